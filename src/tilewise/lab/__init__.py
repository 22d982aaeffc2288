"""The microscope: run every way to compute an attention problem, each in its own process, and compare.

    cli           the `tilewise` command
    inspect       one problem, every backend
    bench         suites of problems, ratios against PyTorch's best path
    compare       verify, then time, in interleaved rounds: what inspect and bench share
    pool, worker  the two ends of the pipe to a candidate's process
    candidates    names -> callables, and the inputs they get
    accuracy      float64 truth, errors and their budgets
    timing        seconds per call, on CPU and CUDA
    environment   what a bug report or a result file must say about the machine
    report        tables and progress: rich on a terminal, plain text in a pipe

Only `cli` and `report` need the packages of the `lab` extra; a worker imports nothing beyond torch.
"""
