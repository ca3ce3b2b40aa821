"""Programs that the model writes: a sandbox that runs them, and a grader that compares their output with a row's tests."""
