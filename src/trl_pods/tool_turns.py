"""Generation by a vLLM server for rows that go on after a tool call, of which processes have unequal numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from trl.generation import vllm_generation


@contextmanager
def turns_of_single_rows(generation: Any) -> Iterator[None]:
    """
    Let a `VLLMGeneration` in server mode generate one completion for each row, however many rows a process has.

    Every row has a history of its own by then. TRL counts on groups of equal rows (before 1.14), gives a process the
    completions that are its own only if all have equally many rows, and waits for those that have none left.

    Args:
        generation (`VLLMGeneration`):
            That of the trainer, on every process. All must enter and leave; a process that leaves waits for the turns
            of the others.
    """
    generate = generation.generate
    turns = _Turns(generation)
    generation.generate = turns.generate
    try:
        yield
        turns.take_part_in_those_of_others()
    finally:
        generation.generate = generate


class _Turns:
    def __init__(self, generation: Any) -> None:
        self._generate = generation.generate
        self._accelerator = generation.accelerator

    def generate(self, prompts: list, images: list | None, num_generations: int, profiler: Any = None) -> tuple:
        if self._accelerator.num_processes == 1:
            return self._generate(prompts, images, 1, profiler)
        return self._generate_for_all(gather_object([len(prompts)]), prompts, images, profiler)

    def take_part_in_those_of_others(self) -> None:
        while self._accelerator.num_processes > 1 and any(counts := gather_object([0])):
            self._generate_for_all(counts, [], None, None)

    def _generate_for_all(self, counts: list[int], prompts: list, images: list | None, profiler: Any) -> tuple:
        all_prompts = gather_object(prompts)
        all_images = gather_object([None] * len(prompts) if images is None else images)
        outputs: list[Any] = [None]
        if self._accelerator.is_main_process:
            with _without_exchange():
                outputs = [self._generate(all_prompts, all_images, 1, profiler)]
        broadcast_object_list(outputs)
        start = sum(counts[: self._accelerator.process_index])
        return tuple(None if column is None else column[start:][: len(prompts)] for column in outputs[0])


@contextmanager
def _without_exchange() -> Iterator[None]:
    """`VLLMGeneration.generate` on the main process alone: the rows that it is given are those of all."""
    gather, broadcast = vllm_generation.gather_object, vllm_generation.broadcast_object_list
    vllm_generation.gather_object = lambda rows: rows
    vllm_generation.broadcast_object_list = lambda objects, from_process=0: objects
    try:
        yield
    finally:
        vllm_generation.gather_object, vllm_generation.broadcast_object_list = gather, broadcast
