"""A model's answer as typed parts: reasoning, content and tool calls, from text that comes in pieces.

Any split of the text into pieces gives the same parts once joined: every decision waits until it no longer depends on
where a piece ends.
"""
