"""A frozen designer's server, for real: its tokens are those of the checkpoint, and no update gets in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scenes.fake_vllm import policy
from test_vllm import PROMPT
from tiny_llama import logprobs, tiny

from engine.config import Config, DesignerConfig, FrozenConfig, ModelConfig, RunConfig, SamplingConfig
from engine.inference.completion import InferenceError
from engine.inference.frozen import open_frozen
from engine.inference.vllm import VllmClient, open_session
from engine.weights.loaders import FileLoader
from engine.weights.update import update

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


async def test_no_update_gets_into_a_frozen_server(tmp_path: Path) -> None:
    model = tiny(tmp_path / "frozen", tied=False)
    (tmp_path / "frozen" / "tokenizer.json").write_text("{}")
    config = Config(
        run=RunConfig(name="t"),
        model=ModelConfig(path="the policy, which is elsewhere", max_model_len=512),
        designer=DesignerConfig(
            kind="frozen", frozen=FrozenConfig(path=str(tmp_path / "frozen")), concurrency=4
        ),
    )
    sampling = SamplingConfig(max_tokens=8)
    async with open_frozen(config, tmp_path, name="x") as server, open_session() as session:
        before = await server.generate(PROMPT, sampling=sampling, key="d", stop_token_ids=(2,))
        client = VllmClient(server.url, session)
        with pytest.raises(InferenceError):
            await update(
                client, policy(5), cache="recompute", tolerance=1.0, load_seconds=20.0, loader=FileLoader()
            )
        for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            async with session.post(server.url + path, data=b"{}") as response:
                assert response.status == 404, path
        after = await server.generate(PROMPT, sampling=sampling, key="d", stop_token_ids=(2,))
    for completion in (before, after):
        assert {span.version for span in completion.spans} == {-1}
        expected = logprobs(model, PROMPT + completion.tokens)[len(PROMPT) - 1 :]
        assert np.abs(expected - completion.logprobs).max() < 1e-3
