"""A learner that publishes adapters which mean something to the fake server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from scenes.fake_vllm import policy

from bus import Bus
from bus.messages import PolicyPublished
from engine.lineage import Version
from engine.weights.adapters import AdapterPublisher

SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}


class AdapterLearner:
    """Publishes adapters whose first number is the step: that is what the fake server computes with."""

    def __init__(self, directory: Path, bus: Bus, *, way: str = "file", keep: int = 10) -> None:
        self.bus = bus
        self.publisher = AdapterPublisher(directory, SETTINGS, bus=way == "bus", keep=keep)

    async def publish(self, step: int) -> PolicyPublished:
        """Write the version, with what it needs on the bus, and return its announcement."""
        tensors = {"base_model.model.q_proj.lora_A.weight": torch.full((4, 8), float(step))}
        release = self.publisher.release(Version(0, step), tensors)
        await self.publisher.upload(self.bus.blobs, release)
        await self.publisher.tidy(self.bus.blobs)
        fields = {"uri": release.uri, "sha256": release.sha256, "size": release.size}
        return msgspec.structs.replace(policy(step), **fields)
