"""The microscope: run every way to compute an attention problem, each in its own process, and look at it closely.

    cli, cli_*, options      the `tilewise` command: one module for the large subcommands, options shared by all
    inspect, inspect_text    one problem, every candidate: kernels, times, ceilings, reasons
    static                   the same without a GPU, as far as that goes
    bench, suites, clocks    suites of problems, ratios against PyTorch's best path, the GPU's clocks meanwhile
    records, docs, plots     what bench has written, read back: tables and pictures of the documents
    cycles, ncu              Nsight Compute: cycles of a suite, counters of a problem
    trace, override, traced, trace_text   every attention call of a program
    tune                     the search for the best tiles
    html, charts, pages      the report

    compare                  verify, then time, in interleaved rounds: what all of the above share
    pool, worker             the two ends of the pipe to a candidate's process
    processes                how processes of our own are started
    candidates, flags, rivals, variants, inputs   names -> callables, and the tensors they get
    accuracy                 float64 truth, errors and their budgets
    timing, profile          seconds per call, and the kernels of a call
    kernels, roofline        occupancy, build facts, instruction mix; what the hardware allows
    environment              what a bug report or a result file must say about the machine
    report                   tables and progress: rich on a terminal, plain text in a pipe

Only the commands need the packages of the `lab` extra: `tilewise.trace()` and a worker import nothing beyond torch.
"""
