"""Programs that a model wrote: a sandbox that runs them, and the grader that compares what they print with a row's tests."""
