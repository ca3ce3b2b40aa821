"""A reward that any model earns a little of: how many different characters a response has."""


def score(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 8
