"""Publishing a bundle to the Hub: gathered and checked here, sent in one commit, read back."""

from spectrain.hub.contents import Publication, Request, gather
from spectrain.hub.remote import Sent, send

__all__ = ["Publication", "Request", "Sent", "gather", "send"]
