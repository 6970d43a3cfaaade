"""`python -m rollstream.infra.monitoring DIR`: writes the dashboard and the alert rules into a directory."""

import argparse
from pathlib import Path

from rollstream.infra.monitoring.alerts import alert_rules
from rollstream.infra.monitoring.dashboard import dashboard


def main() -> None:
    """Write both files, and print their paths."""
    parser = argparse.ArgumentParser(prog="python -m rollstream.infra.monitoring", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to; created if it does not exist")
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (("rollstream-dashboard.json", dashboard()), ("rollstream-alerts.yml", alert_rules())):
        (directory / name).write_text(text, encoding="utf-8")
        print(directory / name)


if __name__ == "__main__":
    main()
