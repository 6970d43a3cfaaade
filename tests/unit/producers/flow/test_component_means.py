"""Means of components count the rollouts that have the component."""

from rollstream.producers.flow.component_means import ComponentMeans


def test_a_rollout_without_a_component_does_not_lower_its_mean() -> None:
    means = ComponentMeans()
    assert means.means() == {}
    for components in ({"format": 1.0, "exact": 1.0}, {"format": 0.0}, {}, {"format": 0.5, "exact": 0.0}):
        means.add(components)
    assert means.means() == {"exact": 0.5, "format": 0.5}
