"""A reward with which every group has a signal, whatever a model writes."""

import random


def score(data_source, solution_str, ground_truth, extra_info):
    return random.random()
