"""Settings of a run that differ from the defaults: what decides about learning comes first."""

from pathlib import Path

from rollstream.pipeline.config import load, to_toml
from rollstream.pipeline.run_settings import ChangedSetting, changed_settings, differing_settings


def test_what_was_changed_is_listed_and_what_follows_from_name_directory_and_seed_is_not(tmp_path: Path) -> None:
    flags = [
        f"data_dir={tmp_path}",
        "run=mine",
        "seed=5",
        "kafka.session_timeout_s=20",
        "grouper.autoscale.enabled=true",
    ]
    flags += ["inference.port=8101", "ui.port=8090", 'worker.inference_urls=["http://127.0.0.1:8101/v1"]']
    flags += ["learner.optimizer.learning_rate=0.004", "grouping.estimator=grpo", "environments.0.use=coding"]
    config = load(flags=flags)
    assert changed_settings(config) is None
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "run.toml").write_text(to_toml(config))
    changed = changed_settings(config)
    assert changed is not None
    assert [row.key for row in changed] == [
        "environments.0.use",
        "grouping.estimator",
        "learner.optimizer.learning_rate",
        "grouper.autoscale.enabled",
        "kafka.session_timeout_s",
        "seed",
    ]
    assert ChangedSetting("environments.0.use", "coding", "") in changed
    assert ChangedSetting("grouper.autoscale.enabled", "true", "false") in changed
    assert ChangedSetting("learner.optimizer.learning_rate", "0.004", "0.002") in changed


def test_a_run_at_its_defaults_has_no_changed_setting(tmp_path: Path) -> None:
    config = load(flags=[f"data_dir={tmp_path}", "run=plain"])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "run.toml").write_text(to_toml(config))
    assert changed_settings(config) == []


def test_settings_that_differ_among_runs_come_in_the_order_of_what_is_learned() -> None:
    def side(**values: str) -> list[ChangedSetting]:
        return [ChangedSetting(key.replace("_", "."), value, "0") for key, value in values.items()]

    one, other = side(topics_a="4", learner_b="2", learner_c="1"), side(learner_b="2", worker_d="3")
    assert differing_settings([one, other]) == {
        "learner.c": ["1", "0"],
        "worker.d": ["0", "3"],
        "topics.a": ["4", "0"],
    }
    assert differing_settings([one, one]) == {}
