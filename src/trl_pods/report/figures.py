"""How figures look, and how they are made and saved. Needs matplotlib."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..whole_files import replacing


if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers tell apart; grey for the baseline.
BASELINE_COLOR = "#555555"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#000000")
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "trl_pods",  # the same data give the same file
}
_SUBTITLE: dict[str, Any] = {"fontsize": 8.5, "color": "#555555"}
_WIDTH = 7.2  # inches


def check_matplotlib() -> None:
    """
    Say how to get matplotlib if it is not there.

    Raises:
        ImportError: If it is not.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'trl-pods[report]', or use --no_plots.") from error


@contextmanager
def drawing() -> Iterator[None]:
    """A block in which figures get our style. Says how to get matplotlib if it is not there."""
    check_matplotlib()
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def title(axes: "Axes", text: str, subtitle: str) -> None:
    """A title with a smaller line below."""
    axes.set_title(text, pad=20)
    axes.annotate(subtitle, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", **_SUBTITLE)


def figure_with_axes(height: float, **grid: Any) -> tuple[Any, Any]:
    """A figure so many inches high, and its axes; `grid` is as in `Figure.subplots`."""
    from matplotlib.figure import Figure  # without pyplot nothing is global and no display is asked for

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(**grid)


def save(figure: Any, folder: Path, name: str) -> str:
    """Save as PNG and SVG, each whole or not at all; the name of the PNG file."""
    options: dict[str, dict[str, Any]] = {"svg": {"metadata": {"Date": None}}, "png": {"dpi": 160}}
    for kind, of_kind in options.items():
        with replacing(folder / f"{name}.{kind}") as unfinished:
            figure.savefig(unfinished, format=kind, **of_kind)
    return f"{name}.png"
