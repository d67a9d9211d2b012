"""
Trainings on two processes (gloo) that are killed by `kill -9` and resumed: `python interrupted_runs.py FOLDER WHAT`.

WHAT is the name of some of MOMENTS, or `random NUMBER` for so many kills at random moments. The processes are forked
after the imports, which take longest. What was found goes to FOLDER/report.json; the assertions are in
test_interruption.py.
"""

import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

import pandas as pd
import torch
from rig import LOGGED, Group, Script, make_trainer
from torch.distributed import destroy_process_group
from transformers import TrainerCallback
from transformers import trainer as transformers_trainer

from trl_pods import PODSGRPOTrainer
from trl_pods.checkpoints import last_whole_checkpoint, step_of, why_torn


NUM_PROCESSES = 2
PATIENCE = 120.0  # seconds after which a process counts as hanging

# Two steps a round, a checkpoint every two rounds.
SETTINGS = {
    "num_rollouts": 8,
    "num_generations": 4,
    "per_device_train_batch_size": 2,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
    "max_steps": 12,
    "save_strategy": "steps",
    "save_steps": 4,
    "save_total_limit": 2,
    "shuffle_dataset": True,
    **LOGGED,
}


@dataclass
class Moment:
    """Where a process stops and waits to be killed, and whether the other one is killed as well."""

    place: str
    step: int  # optimizer steps done
    process: int
    kill_all: bool
    selector: str
    resumes_from: int


MOMENTS = {
    "one_while_generating": Moment("generating", 6, 1, False, "random", 4),
    "all_while_scoring": Moment("scoring", 6, 0, True, "max_variance", 4),
    "all_while_updating": Moment("updating", 9, 0, True, "random", 8),
    "all_with_half_an_optimizer_saved": Moment("saving_optimizer", 8, 0, True, "random", 4),
    "one_before_it_saves_its_random_state": Moment("saving_random_state", 8, 1, False, "max_variance", 4),
    "all_between_saving_and_rotation": Moment("rotating", 12, 0, True, "random", 12),
}


class StopsAt(PODSGRPOTrainer):
    """Writes FOLDER/stopped at a moment and waits there."""

    moment: Moment | None = None

    def stop_at(self, place):
        moment, here = self.moment, (place, self.state.global_step, self.accelerator.process_index)
        if moment is not None and here == (moment.place, moment.step, moment.process):
            Path(self.args.output_dir, "stopped").touch()
            signal.pause()

    def _generate_single_turn(self, *args, **kwargs):
        self.stop_at("generating")
        return super()._generate_single_turn(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.moment is not None and self.moment.place == "saving_optimizer":
            file = Path(output_dir, "optimizer.pt")
            if self.args.should_save and self.state.global_step == self.moment.step:
                os.truncate(file, file.stat().st_size // 2)
            self.stop_at("saving_optimizer")

    def _save_rng_state(self, output_dir):
        self.stop_at("saving_random_state")
        super()._save_rng_state(output_dir)


class TellsAndStops(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        Path(args.output_dir, f"begun{args.process_index}").touch()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.stop_at("updating")


def train(folder, selector, moment, checkpoint):
    """What one process does."""
    trainer = None

    def reward(completion_ids, **kwargs):
        trainer.stop_at("scoring")
        return [float(sum(ids) % 11) for ids in completion_ids]

    def rotate(*args, **kwargs):
        trainer.stop_at("rotating")
        rotate_checkpoints(*args, **kwargs)

    script = Script([Group([0] * 8)] * 12)  # for its prompts; completions are sampled
    kwargs = {"rollout_func": None, "reward_funcs": [reward]}
    trainer = make_trainer(folder, script, StopsAt, trainer_kwargs=kwargs, selector=selector, **SETTINGS)
    trainer.moment = moment
    trainer.add_callback(TellsAndStops(trainer))
    rotate_checkpoints = transformers_trainer.rotate_checkpoints
    transformers_trainer.rotate_checkpoints = rotate
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.accelerator.is_main_process:
        torch.save(trainer.model.state_dict(), folder / "weights.pt")
        (folder / "history.json").write_text(json.dumps(trainer.state.log_history))
    destroy_process_group()


def start(folder, selector, moment=None, checkpoint=None):
    """Fork the processes of a training; returns their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(NUM_PROCESSES):
        pid = os.fork()
        if pid == 0:
            run_forked(folder, rank, port, selector, moment, checkpoint)
        pids.append(pid)
    return pids


def run_forked(folder, rank, port, *arguments):
    code = 1
    try:
        log = os.open(folder / f"log{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_PROCESSES)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(NUM_PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        train(folder, *arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(pids, seconds=PATIENCE):
    """Wait for all; returns how many hung and had to be killed, and whether all ended well."""
    deadline, codes, hanging = time.monotonic() + seconds, {}, 0
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = status
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                hanging += 1
                codes[pid] = os.waitpid(pid, 0)[1]
        time.sleep(0.02)
    return hanging, not any(codes.values())


# What is left in a folder


def read_tables(folder, up_to=SETTINGS["max_steps"]):
    """The tables of the steps by step; None for one that cannot be read."""
    tables = {}
    for step in range(1, up_to + 1):
        try:
            tables[step] = pd.read_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
        except Exception:
            tables[step] = None
    return tables


def lost_rows(tables, whole):
    """Rows of a straight run that these tables do not have as they were."""
    return sum(
        len(whole[step]) if table is None else int(differs(table, whole[step]).any(axis=1).sum())
        for step, table in tables.items()
    )


def differs(table, other):
    return table.ne(other) & ~(table.isna() & other.isna())


def logs_of(history):
    """The logs of steps but for what a clock measured."""
    logs = [log for log in history if "loss" in log]
    return [{key: value for key, value in log.items() if "time" not in key} for log in logs]


def torn_files(folder):
    files = [path for path in (folder / "completions").glob("*.parquet") if not is_table(path)]
    return {
        "tables": len(files),
        "checkpoints": {path.name: why_torn(path) for path in folder.glob("checkpoint-*") if is_torn(path)},
    }


def is_table(path):
    try:
        return len(pd.read_parquet(path)) > 0
    except Exception:
        return False


def is_torn(path):
    return path.is_dir() and why_torn(path) is not None


@dataclass
class Straight:
    """A run that was not interrupted."""

    weights: dict
    logs: list
    tables: dict
    step_seconds: float


def run_straight(folder, selector):
    _, well = wait(start(folder, selector))
    assert well, (folder / "log0.txt").read_text()[-3000:]
    seconds = (folder / "weights.pt").stat().st_mtime - (folder / "begun0").stat().st_mtime
    weights, history, tables = torch.load(folder / "weights.pt"), read_history(folder), read_tables(folder)
    return Straight(weights, history, tables, seconds / SETTINGS["max_steps"])


def read_history(folder):
    return logs_of(json.loads((folder / "history.json").read_text()))


def interrupt(folder, selector, moment, kill):
    """Start, kill, and look at what is left, resume, and look at what has become of it."""
    pids = start(folder, selector, moment)
    kill(pids)
    hanging, _ = wait(pids)
    found = {"hanging": hanging, "ended": (folder / "weights.pt").exists(), "torn": torn_files(folder)}
    checkpoint = last_whole_checkpoint(folder)
    logs = [(folder / f"log{rank}.txt").read_text() for rank in range(NUM_PROCESSES)]
    found["death_named"] = any("have died" in log for log in logs)
    found["resumes_from"] = 0 if checkpoint is None else step_of(checkpoint)
    return found


def resume(folder, selector, found, straight):
    up_to = found["resumes_from"]
    found["lost_rows"] = lost_rows(read_tables(folder, up_to), straight.tables)
    if up_to:
        state = json.loads((folder / f"checkpoint-{up_to}" / "trainer_state.json").read_text())
        found["logs_whole"] = logs_of(state["log_history"]) == straight.logs[:up_to]
    else:
        found["logs_whole"] = True
    hanging, well = wait(start(folder, selector, checkpoint=True if up_to else None))
    found |= {"resumed": well and not hanging, "equal_weights": False, "equal_logs": False}
    found["warned"] = "is torn and is skipped" in (folder / "log0.txt").read_text()
    if found["resumed"]:
        weights = torch.load(folder / "weights.pt")
        found["equal_weights"] = all(torch.equal(weights[name], straight.weights[name]) for name in straight.weights)
        found["equal_logs"] = read_history(folder) == straight.logs
        found["lost_rows_at_the_end"] = lost_rows(read_tables(folder), straight.tables)
    return found


def wait_for(file):
    deadline = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.002)


def run_moment(folder, name, straight):
    moment = MOMENTS[name]

    def kill(pids):
        wait_for(folder / "stopped")
        for pid in pids if moment.kill_all else [pids[moment.process]]:
            os.kill(pid, signal.SIGKILL)

    found = interrupt(folder, moment.selector, moment, kill)
    return resume(folder, moment.selector, found | {"stopped": (folder / "stopped").exists()}, straight)


def run_random(folder, number, straight):
    chance = random.Random(number)

    def kill(pids):
        step = chance.randrange(SETTINGS["max_steps"])  # not by the clock, as other work makes runs fast or slow
        for rank in range(NUM_PROCESSES):  # before that torch waits for the others to connect
            wait_for(folder / f"begun{rank}")
        if step:
            wait_for(folder / "completions" / f"completions_{step:05d}.parquet")
        time.sleep(chance.uniform(0, 1.5 * straight.step_seconds))
        for pid in chance.choice([pids, pids[:1], pids[1:]]):
            os.kill(pid, signal.SIGKILL)

    found = interrupt(folder, "random", None, kill)
    return resume(folder, "random", found, straight)


def main():
    folder, what = Path(sys.argv[1]), sys.argv[2:]
    report = {}
    if what[0] == "random":
        straight = run_straight(folder / "straight", "random")
        for number in range(int(what[1])):
            report[number] = run_random(folder / str(number), number, straight)
            (folder / "report.json").write_text(json.dumps(report))
        return
    straight = {rule: run_straight(folder / rule, rule) for rule in {MOMENTS[name].selector for name in what}}
    for name in what:
        report[name] = run_moment(folder / name, name, straight[MOMENTS[name].selector])
        (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
