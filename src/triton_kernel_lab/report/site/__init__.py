"""The report as one page that opens offline: ``stage.py`` writes it, ``template.html`` says what stands where."""
