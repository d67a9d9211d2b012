import torch


def push_to_always_say(model: torch.nn.Module, token: int) -> None:
    """Change the weights so that this token follows whatever was said."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        embedding[:] = embedding[token]
        if output is not embedding:
            output[:] = embedding[token]
        output[token] *= 100
