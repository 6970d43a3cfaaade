"""The description of a run, and what is made from it to run one elsewhere than under `rollstream run`."""
