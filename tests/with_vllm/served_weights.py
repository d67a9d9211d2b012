"""
Weight transfer to a vLLM server without CUDA: a file and the server's own call of its workers, in place of NCCL.

Everything else is TRL's and vLLM's: which tensors are sent under which names, how the engine loads them.
"""

from pathlib import Path


class LoadFromFile:
    """Mixed into the workers of the server (`--worker-extension-cls`)."""

    def load_file(self, path: str) -> None:
        from safetensors.torch import load_file

        self.model_runner.model.load_weights(load_file(path).items())


def transfer_by_file(client_class: type, folder: Path) -> None:
    """Put the file in place of NCCL in a client class."""
    from safetensors.torch import save_file

    def update_named_params(self, metadata, named_params):
        tensors = {name: tensor.clone().contiguous() for name, tensor in named_params}
        assert [name for name, _, _ in metadata] == list(tensors)
        save_file(tensors, folder / "weights.safetensors")
        call = {"method": "load_file", "args": [str(folder / "weights.safetensors")]}
        response = self.session.post(f"{self.base_url}/collective_rpc", json=call)
        assert response.status_code == 200, response.text

    client_class.init_communicator = lambda self, device: None
    client_class.update_named_params = update_named_params
