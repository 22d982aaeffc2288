"""The microscope: run every way to compute an attention problem, each in its own process, and look at it closely.

    units, processes, report   figures with units; how processes of our own start; reports as blocks, and their text
    candidates/    names -> callables, and the tensors they get
        names, inputs        every candidate by name; its tensors, from a seed or a file
        rivals, flags        other packages' attention; PyTorch's switches
        variants, override   a backend with its config spelled out; what PyTorch does by itself
    model/         what needs no run: roofline, kernels (occupancy, build facts, instruction mix), static
    measure/       instruments
        compare              verify, then time, in interleaved rounds: what all studies share
        pool, worker         the two ends of the pipe to a candidate's process
        accuracy, timing     float64 truth, errors and their budgets; seconds per call
        profile, ncu, stages the kernels of a call; Nsight Compute's counters; one rung taken apart
        statistics, words    the statistic of every comparison, and what may be said of it
        noise, clocks, environment, ahead   what else the machine did; its clocks; its facts; compiling before
    studies/       what a command finds out: inspect, switches, bench (suites, records), check, tune, ladder,
                   cycles, diff, builds
    watch/         every attention call of a program: trace, traced, torchrun, trace_report
    render/        reports of records (inspect, bench), and their pages (blocks, pages)
    commands/      the `tilewise` command: one file per subcommand; app lists them, command has what they are made of,
                   options and output the groups of options that they share

Imports go one way, down this list: a module may import those of its own folder and of what stands above it
(tests/test_architecture.py). Only commands need the packages of the `lab` extra: `tilewise.trace()` and a worker import
nothing beyond torch.
"""
