"""Structured output: grammars judged, compiled, and matched token by token.

shape       what can be refused at a glance: size, depth, JSON that is none
checking    compiles for the router, in processes of their own that can be killed (`checking_child`)
compile     compiles, by either backend (`llguidance_backend`, `xgrammar_backend`)
apart       compiles and matches in a process of its own (`apart_child`): workers import no xgrammar
compiled    the compiled grammars of a worker, for as long as there is room
matcher     which tokens may come next, for one sequence
"""
