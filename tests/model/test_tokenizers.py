"""A run's tokens are text for `show`, the page and an archive, although no machine has the model's files any more."""

import json
import shutil

import numpy as np

from rollstream.consumers.models.tokenizer_file import load_tokenizer
from rollstream.consumers.models.tokenizer_log import put_tokenizer
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.indexed_run import RolloutPlace
from rollstream.pipeline.index.run_index import RunIndex
from tests.support.checkpoints import write_tokenizer
from tests.support.runs import RealRun, rollout


def test_tokens_are_text_without_the_files_of_the_model(real_run: RealRun) -> None:
    run, directory = real_run.prepare(), real_run.directory / "model"
    directory.mkdir()
    write_tokenizer(directory, ["seven apples and one\nmore"] * 3)
    ids = load_tokenizer(directory).encode("seven apples\n")
    texts = [load_tokenizer(directory).decode([each]) for each in ids]
    assert "".join(texts) == "seven apples\n"
    put_tokenizer(run.kafka, run.name, "")
    put_tokenizer(run.kafka, run.name, str(directory))
    written = len(run.read("tokenizers"))
    put_tokenizer(run.kafka, run.name, str(directory))
    assert len(run.read("tokenizers")) == written, "the run's tokenizer is on the log once"
    shutil.rmtree(directory)

    sampled = np.arange(len(ids)) > 0
    likely = np.full(len(ids), -0.1, "<f4")
    likely[-1] = -4.0
    run.send([rollout(tokens=np.array(ids, "<i4"), loss_mask=sampled, logprobs=likely)])
    shown = run.told("show", "x-0")
    assert "least likely: " in shown
    assert "[\u23ce] at" in shown
    assert texts[0].replace(" ", "\u00b7")[:8] in shown

    run.told("archive", "--arrays")
    query = "select text, sampled, logprob from tokens where uid = 'x-0' order by position"
    rows = json.loads(run.told("sql", query, "--json"))
    assert [row["text"] for row in rows] == texts
    assert [row["sampled"] for row in rows] == sampled.tolist()

    config = RunConfig(run=run.name, kafka=run.kafka, data_dir=run.directory)
    with RunIndex.open(config, str(run.directory / "archive")) as index:
        index.catch_up()
        [place] = index.db.execute("select partition, offset from rollouts").fetchall()
        assert index.details(RolloutPlace(*place))["tokens"]["texts"] == texts
