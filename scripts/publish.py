"""Put a measured bundle on the Hub, with its card: python scripts/publish.py BUNDLE ORG/NAME --license ID --dry-run."""

from spectrain.cli import publish, script

if __name__ == "__main__":
    script(publish, "scripts/publish.py")
