"""The picture of `tilewise magnitudes`, from its record: errors against float64 by the magnitude of the inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..studies.magnitudes import WHAT, is_number
from . import plots

if TYPE_CHECKING:
    from pathlib import Path


def draw(record: dict[str, Any], path: Path) -> None:
    """A row of panels for out, one for gradients; from a record, so that a kept one can be drawn again."""
    pyplot = plots.load_pyplot()
    series = record["series"]
    figure, axes = pyplot.subplots(
        len(WHAT), len(series), figsize=(11.0, 5.2), squeeze=False, sharey=True, layout="constrained"
    )
    for line, what in zip(axes, WHAT, strict=True):
        for axis, (scaling, by_name) in zip(line, series.items(), strict=True):
            for (name, points), style in zip(by_name.items(), plots.styles(), strict=False):
                kept = [(point["magnitude"], point[what]) for point in points if is_number(point[what])]
                axis.plot([x for x, _ in kept], [y for _, y in kept], label=name, **style)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_title(f"{what}: {scaling}", fontsize=9)
            axis.grid(alpha=0.3, linewidth=0.5)
        line[0].set_ylabel("relative error")
    for axis in axes[-1]:
        axis.set_xlabel("magnitude")
    axes[0][0].legend(fontsize=8)
    figure.suptitle("Error against float64 by the magnitude of the inputs", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    plots.save(figure, path)
    pyplot.close(figure)
