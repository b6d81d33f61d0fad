"""The gate that a change passes before it lands: which parts of it a change runs, and what came of each.

lanes         lanes.toml: which tests belong to a lane, and which lanes a changed path selects
bases         passed.json: the commit on which each lane last passed, and what has changed since
environments  Python environments by the hash of what they install, kept outside the checkout
wheels        the wheel with the compiled router, built once for its sources
repeated      tests again and again on a busy machine
pythons       the tests of every change on other Pythons
steps         what is run, in which order
outcomes      results of a step: counts, skips against skips.toml, and tests that failed by chance
weight        how many modules, lines and files of a request's path the product has

Needs nothing but the standard library: `.ci/run` calls it before anything is installed.
"""
