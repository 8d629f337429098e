"""Judge: turns a case into a verdict, the same way for sessions, the kill matrix and `verify`.

May import plan, run and the modules below them; torch-free. Start reading at `judge`. `law` declares laws, `support`
says what a machine can judge, `verdicts` gives the verdict of an exception and the exit status of a session, `waivers`
reads waivers.yaml, `measurements` collects the metrics of a case, with their distances from bounds, `shrinking` finds
the smallest cell on which a law fails.
"""
