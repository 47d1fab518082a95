"""The daemon's side of the local tier (docs/design/0005).

`tier_service` combines `server` (accepts copies), `client` (sends them) and `buddy_fetch` (fetches them). `config` and
`protocol` are shared.
"""
