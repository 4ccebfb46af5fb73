"""Stage 3 ranks agree on the next gather, whatever modules each of them runs, in whatever order.

    usually      A plan. If all ranks have used the same units in the same order, that sequence is the plan of the
                 next such pass: every rank issues its gathers in order, without messages.
    otherwise    Requests and decisions. Without a plan, and when a rank leaves one, ranks tell each other what they
                 request. A rank also sends its rows of units that only others request.

    `gathering.py`   a rank's request, with its rows and buffers; `Negotiation`, what engines call
    `own_rows.py`    the rows that this rank can send, of all engines
    `passes.py`      which plan a pass follows, from what all ranks did in earlier passes
    `lockstep.py`    ranks that only communicate by collectives: plans, and messages in small all-gathers
    `requests.py`    the messages, and the rule that turns them into decisions
    `host.py`        ranks that share memory: a request is a word beside the row, so there are no plans

A request goes one way. It takes this rank's rows and a pool of buffers along, and its result is a `Gathering` to wait
for. Nothing here asks an engine for rows, buffers or decisions. Only reductions are called, by what `meanwhile` and
`reduces_by` have been given: to add a sum that has arrived, and to launch one that a plan expects.

Requests and decisions in detail:

Every rank requests the units it needs, in the order of its own program. Open requests form one queue per rank. The next
action only depends on the heads of all queues, so that all ranks reach the same decisions without further messages:

    queues   rank 0: layer 3, layer 4          decision 1: layer 2, for rank 1; rank 0 sends its row and still waits
             rank 1: layer 2, layer 3          decision 2: layer 3, for both
                                               decision 3: layer 4, once rank 1 has requested something or has ended

A request is GATHER (a unit), END (my pass is over), STEP (my weights are about to change), or WAIT (I wait for
something else, continue without me). END and STEP are granted when all ranks are there, so that no rank leaves while
others may still need its rows. Ranks that run the same modules in the same order always have equal heads: then no rank
takes part in a gather that it does not need, and nothing is gathered twice.

Why values are right: a row is identified by its unit and the number of updates, which every request carries and every
decision compares, never by the order of calls.

Why nothing hangs: suppose that all ranks wait for a decision or a message, and that nothing is in flight. Suppose that
there is a GATHER or a WAIT with `lets_go` among the heads. Then every rank with an empty queue waits for a message, has
been told that its request is awaited, and has requested WAIT. So all heads have arrived, and a decision has been made.
`decide` either raises an error on all ranks or grants something, and ranks that were not granted anything have sent
what the others need, because every waiting rank also decides. So there is no such head, and no rank that waits for a
message can wait for a rank at END or STEP: words between two ranks arrive in order, so a rank at END or STEP sends
nothing more before it is granted, and a rank that waits for it requests WAIT with `lets_go`. Then END is granted, and
STEP raises an error, because ranks have not run backward, or gathered parameters explicitly, equally often. If all are
at END or STEP, that is decided; so some wait for each other's messages. But these belong to calls that every rank makes
in the same order and posts before it waits for the others: the rank that has made the fewest calls waits for nobody.
(This holds for each kind of call separately: for reductions, and for explicit gathers by the user. A program that
gathers explicitly inside backward, at different places on different ranks, may deadlock.)

With several groups (hpZ on one host), a call waits for all its ranks together, not for one after the other: if one that
has not posted is at END in its own group, a member of that group that waits in this call or a later one sees it. A rank
is let go on only if this rank cannot go on without it. It may then leave for calls of the caller's own, where it serves
nobody.
"""


class Disagreement(RuntimeError):
    """Raised on all ranks if their requests contradict each other."""
