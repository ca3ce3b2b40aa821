"""A reward that every model earns in part: the number of different characters in a response."""


def score(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 8
