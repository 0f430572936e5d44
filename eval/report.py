"""Rebuild the reports of a measurement: python eval/report.py acceptance.json --output DIR."""

from spectrain.cli import report, script

if __name__ == "__main__":
    script(report, "eval/report.py")
