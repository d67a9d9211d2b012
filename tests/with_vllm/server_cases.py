"""
A trainer that generates by a vLLM server: `[torchrun --nproc_per_node 2] server_cases.py FOLDER URL`.

The policy is a random model that may say a tool call (one token), three letters and the end, so that processes have
unequally many rows with tool calls. Each process writes what it saw to FOLDER/rank<N>.json; the main process also
what went over the wire. The assertions are in test_server.py.
"""

import json
import sys
from pathlib import Path


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import requests
from conversations import chat_template, make_byte_tokenizer
from datasets import Dataset
from one_word_policy import push_to_always_say
from rig import make_config, make_model
from torch.distributed import destroy_process_group, is_initialized
from trl.generation.vllm_client import VLLMClient

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer


CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
SAID = [CALL, "A", "B", "C", "<|im_end|>"]
N, M, N_EVAL, NUM_PROMPTS, NUM_STEPS = 16, 4, 3, 2, 2


def save_policy(folder: Path) -> None:
    tokenizer = make_byte_tokenizer(CALL)
    tokenizer.chat_template = chat_template("qwen3")
    tokenizer.save_pretrained(folder)
    make_model(
        vocab_size=len(tokenizer),
        hidden_size=64,  # with 2 heads: the attention of vLLM on a CPU takes a head_dim of 32
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def multiply(a: int, b: int) -> int:
    """
    Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


class Wire:
    """Notes the requests for completions and the answers, and how often weights were sent."""

    def __init__(self) -> None:
        self.completions, self.weights, self._post = [], 0, requests.Session.post
        requests.Session.post = lambda session, url, **kwargs: self.post(session, url, **kwargs)

    def post(self, session, url, **kwargs):
        response = self._post(session, url, **kwargs)
        if url.endswith("/v1/completions"):
            sent = {key: kwargs["json"][key] for key in ("prompt", "n")}
            answers = [choice["token_ids"] for choice in response.json()["choices"]]
            self.completions.append(sent | {"answers": answers})
        self.weights += url.endswith("/collective_rpc")
        return response


def main(folder: Path, url: str) -> None:
    from served_weights import transfer_by_file

    transfer_by_file(VLLMClient, folder)
    wire, rows = Wire(), []

    def note(prompts, completion_ids, **kwargs):
        rows.append([list(ids) for ids in completion_ids])
        return [float(i) for i in range(len(prompts))]

    policy = str(folder.parent / "policy")
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in ("One", "Two")]})
    num_processes = PODSGRPOConfig(str(folder), use_cpu=True, bf16=False).world_size
    tokenizer = make_byte_tokenizer(CALL)
    trainer = PODSGRPOTrainer(
        model=policy,
        reward_funcs=note,
        args=make_config(
            folder,
            PODSGRPOConfig,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            num_rollouts=N,
            num_generations=M,
            num_generations_eval=N_EVAL,
            per_device_train_batch_size=NUM_PROMPTS * M // num_processes,
            per_device_eval_batch_size=NUM_PROMPTS * N_EVAL // num_processes,
            max_completion_length=600,
            max_tool_calling_iterations=3,
            max_steps=NUM_STEPS,
            learning_rate=0.0,
            generation_kwargs={"allowed_token_ids": [tokenizer(text)["input_ids"][0] for text in SAID]},
        ),
        train_dataset=dataset,
        tools=[multiply],
    )
    trainer.train()
    trainer.evaluate(dataset)
    push_to_always_say(trainer.model, tokenizer.eos_token_id)
    trainer._last_loaded_step = -1  # as after a step
    trainer.evaluate(dataset)
    process = trainer.accelerator.process_index
    seen = {"rows": rows, "completions": wire.completions, "weights": wire.weights}
    (folder / f"rank{process}.json").write_text(json.dumps(seen))
    if is_initialized():
        destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
