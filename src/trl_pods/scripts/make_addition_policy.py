"""
Make the policy of the embedded task, from nothing, in about two minutes on two CPU cores:

    python -m trl_pods.scripts.make_addition_policy [--output_dir FOLDER] [--target_accuracy SHARE]

A 2-layer Qwen2 of width 64 is trained on the training split by plain cross-entropy on answers that are wrong half of
the time, and stopped as soon as it gets a given share of problems right. So it knows what an answer looks like and is
right now and then: where GRPO starts.
"""

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from trl_pods.data.addition import addition_reward, embedded_policy_path, load_addition


BATCH_SIZE = 256
LEARNING_RATE = 3e-3
IGNORED = -100  # label of tokens without a loss


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: digits, plus, equals."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+="])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A Qwen2 with 0.1 million parameters. Heads of 32 dimensions are the smallest that vLLM takes on a CPU."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # wavelengths that suit ten tokens
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def make_batch(
    problems: list[dict], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> dict[str, torch.Tensor]:
    """Problems with answers, half of them those of another problem; the loss is on the answers alone."""
    drawn = rng.choices(problems, k=BATCH_SIZE)
    answers = [p["solution"] if rng.random() < 0.5 else rng.choice(problems)["solution"] for p in drawn]
    texts = [p["prompt"] + answer + "<eos>" for p, answer in zip(drawn, answers, strict=True)]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    labels[:, : len(problems[0]["prompt"])] = IGNORED  # all prompts are equally long
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def sampled_accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[dict], num_problems: int = 1000
) -> float:
    """Share of the first problems that one sample each at temperature 1 gets right."""
    prompts = tokenizer([p["prompt"] for p in problems[:num_problems]], return_tensors="pt", padding=True)
    outputs = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=4)
    completions = tokenizer.batch_decode(outputs[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = addition_reward(completions, [p["solution"] for p in problems[:num_problems]])
    return sum(rewards) / len(rewards)


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, target_accuracy: float, max_steps: int = 2000
) -> None:
    problems, rng = load_addition("train").to_list(), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(1, max_steps + 1):
        model(**make_batch(problems, tokenizer, rng)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            accuracy = sampled_accuracy(model, tokenizer, problems)
            print(f"step {step}: sampled accuracy {accuracy:.3f}")
            if accuracy >= target_accuracy:
                return
    raise RuntimeError(f"The accuracy did not reach {target_accuracy} in {max_steps} steps.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=embedded_policy_path(), help="Default: in the package.")
    parser.add_argument("--target_accuracy", type=float, default=0.18)
    args = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, args.target_accuracy)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"{args.output_dir}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
