"""The daemon's side of the local tier: its budget and tidiness (`room`), and buddies: who they are (`tls`), what they
say (`protocol`), taking copies in (`server`), sending and fetching them (`client`, `sending`). docs/design/0005 has the
reasons.
"""
