"""Laws of interfaces: methods and options of `FSDPModule`, DTensor, parallel styles."""
