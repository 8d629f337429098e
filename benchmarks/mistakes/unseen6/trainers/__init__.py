"""Ten correct trainers: two of each mistake's kind were looked for, no trainer was run before the set was kept."""
