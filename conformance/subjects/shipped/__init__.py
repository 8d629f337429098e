"""Subjects that come with the suite: trainers of other projects, each of which needs a separate environment.

Nothing of the suite imports these modules; `conformance judge conformance.subjects.shipped.fabric:Fabric` does.
"""
