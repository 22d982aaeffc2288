"""The statistic of every comparison this package prints: paired rounds in, a ratio with its interval and a verdict out.

What a measured comparison looks like, in reports and in records (`Speed.to_dict`):

    "speed": {
      "against": "torch-flash",      the other candidate
      "ratio": 1.34,                 its time over this candidate's: above 1, this one is faster
      "low": 1.29, "high": 1.40,     the confidence interval of the ratio; null where there are too few rounds
      "verdict": "faster",           "faster", "slower", "indistinguishable", "too few rounds" or "same kernels"
      "rounds": 11,                  rounds that both candidates have
      "confidence": 0.99
    }

Every candidate of a comparison has `speed`, against the fastest of PyTorch's paths (null without one), and
`speed_default`, against PyTorch's default choice (null where that did not run); `same_as`, the candidate whose kernels
it ran too ("" for none: such candidates are one entry, and are not compared with each other); and `cost_seconds`
({"median", "p20", "p80"} over the rounds of all that is timed: the bar and its whiskers). `ratio` and the
`*_seconds` summaries are as they always were. A comparison has `noise`, a list of sentences about the machine
(empty = quiet), and `undecided`, true where rounds ended before the intervals were narrow.
"""
