"""What the commands find out, as values: one problem, a suite, a sweep of configs, a pair of records."""
