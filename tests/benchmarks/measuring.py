import statistics
import time


def alternating_seconds(functions, repeats=5, clock=time.perf_counter):
    """Median seconds of each function, called in turn so that a slow phase of the machine meets all of them."""
    seconds = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = clock()
            function()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
