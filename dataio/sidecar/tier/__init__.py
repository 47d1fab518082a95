"""The daemon's side of the local tier, and its buddies (docs/design/0005).

A *buddy* is the daemon of another node that keeps copies of this node's steps. A *guest* is a node whose copies this
daemon keeps.

- `tier_service`: the interface for the daemon
- `server`: accepts copies from guests, and returns them
- `client`: sends copies to the buddy
- `buddy_fetch`: fetches copies from the buddy
- `config`, `protocol`: shared by the others
"""
