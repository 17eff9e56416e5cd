"""What is written beside training is what the tensors were when it was asked for."""

import threading

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from attnres.scale.sharded_checkpoint import begin_shards, load_shards


def test_tensors_may_change_while_they_are_written(tmp_path, monkeypatch):
    changed, write = threading.Event(), FileSystemWriter.write_data

    def write_late(self, *plan):
        assert changed.wait(60)
        return write(self, *plan)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_late)
    tensors = {"weight": torch.arange(6.0).view(2, 3), "step": torch.tensor(4.0)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        written = begin_shards(tmp_path / "shares", tensors, dist.new_group([0]))
        for tensor in tensors.values():
            tensor.add_(1)
        changed.set()
        written.result(60)
    finally:
        dist.destroy_process_group()
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_shards(tmp_path / "shares", read)
    assert all(torch.equal(read[name], before[name]) for name in before)
