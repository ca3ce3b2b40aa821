"""--publish adapter: what a learner holds for sending."""

from types import SimpleNamespace

import torch
from torch.distributed import HashStore

from rl.weights import publisher
from rl.weights.publisher import Publisher


def test_the_model_is_let_go_of_once_and_the_memory_of_the_adapters_is_kept(monkeypatch):
    """Pinned memory, where there is an accelerator, is slow to make, and an unpinned copy slow to send."""
    values = {"adapter": torch.ones(3), "model": torch.ones(50)}

    def tensors(dtype, to, frozen):
        return iter(values.items()) if frozen else iter([("adapter", values["adapter"])])

    shapes = {name: list(value.shape) for name, value in values.items()}
    outgoing = SimpleNamespace(shapes=shapes, frozen={"model"}, tensors=tensors, apart=True)
    learner = SimpleNamespace(outgoing=lambda: outgoing)
    split = SimpleNamespace(ranks=SimpleNamespace(device=torch.device("cpu")), bridge=True, store=HashStore(), senders=None)
    monkeypatch.setattr("rl.weights.adapter_probe.AdapterProbe", lambda learner: None)
    made, empty = [], torch.empty
    monkeypatch.setattr(
        publisher.torch,
        "empty",
        lambda *size, **how: made.append(how.get("pin_memory")) or empty(*size, **{**how, "pin_memory": False}),
    )
    monkeypatch.setattr(publisher, "is_accelerator", lambda device: True)
    sends = Publisher(learner, split, torch.float32)
    for value in (1.0, 2.0, 3.0):
        values["adapter"].fill_(value)
        sends.take_copy()
        assert sends._stream[:3].tolist() == [value] * 3
    assert made == [True, True], "the stream with the model, and that of the adapters"
    assert len(sends._stream) < 50
