"""The server of the page: who may ask, what a run answers, and the events of a run that goes on."""
