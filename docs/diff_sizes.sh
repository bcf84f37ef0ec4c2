#!/usr/bin/env bash
# How much the apps' programs differ from mnist_ddp's: changed lines of each file, both sides counted.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
for app in mnist_horovod mnist_lightning; do
  for file in train.py ranks.py weights.py model.py data.py options.py; do
    echo "$app/$file: $(diff "apps/mnist_ddp/$file" "apps/$app/$file" | grep -c '^[<>]') changed lines of $(wc -l <"apps/$app/$file")"
  done
done
