"""Faults on purpose: a training runs twice, undisturbed and while workers are killed, and the weights are compared.

    settings.py    the arguments, and the small trainings that are compared
    faults.py      which fault comes in which phase, drawn from a seed; nothing here runs anything
    harm.py        what is done to processes, the store and nodes
    session.py     a session on Ray in which the faults happen
    comparison.py  both runs, what each fault cost, whether the weights are equal

| kind       | what happens                                                                                    |
|------------|-------------------------------------------------------------------------------------------------|
| SIGKILL    | the worker's process ends; so it does when memory runs out                                      |
| SIGSTOP    | it stands still                                                                                 |
| exception  | the call raises                                                                                 |
| full disk  | the process cannot write to files for a while: its checkpoint is written later                  |
| full store | objects fill Ray's store for a while: it has to write others to the disk; nothing is to be lost |
| lost node  | all processes of a node end                                                                     |
"""
