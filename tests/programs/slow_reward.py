"""A reward function that takes a random time: 5 ms on average if $ROUGH is slow-decoding, else 50 ms."""

import os
import random
import time


def score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(random.expovariate(200 if os.environ["ROUGH"] == "slow-decoding" else 20))
    return float(solution_str.strip() == ground_truth)
