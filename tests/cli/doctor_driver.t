$ test -e "$LF_CLI_FAKES/libcuda.so.1" && echo ready
ready
$ printf '#!/bin/sh\nexport LD_LIBRARY_PATH=$LF_CLI_FAKES\nloongforge doctor | grep -A 1 -E "^[a-z]+ +(GPUs|lib(cuda|nccl|nvidia-ml|nvjpeg|cufile|mpi)) " | grep -v -- "^--"\n' > ../bin/ask; chmod +x ../bin/ask
$ ask || true
ok       libcuda            12.4 (libcuda.so.1)
ok       GPUs               2
ok       libnvidia-ml       550.54.15 (libnvidia-ml.so.1)
ok       libnccl            2.21.5 (libnccl.so.2)
ok       libnvjpeg          12.3.1 (libnvjpeg.so.12)
ok       libcufile          1.6 (libcufile.so.0)
ok       libmpi             Open MPI v4.1.4 (libmpi.so.40)

$ FAKE_CUDA=12010 FAKE_NCCL=21805 FAKE_DRIVER=535.54.03 ask || true
warning  libcuda            12.1 (libcuda.so.1)
                            -> expected 12.2 or newer: update the driver to 535.104 or newer
ok       GPUs               2
warning  libnvidia-ml       535.54.03 (libnvidia-ml.so.1)
                            -> expected 535.104 or newer: update the driver to 535.104 or newer
warning  libnccl            2.18.5 (libnccl.so.2)
                            -> expected 2.19 or newer: update it together with torch
ok       libnvjpeg          12.3.1 (libnvjpeg.so.12)
ok       libcufile          1.6 (libcufile.so.0)
ok       libmpi             Open MPI v4.1.4 (libmpi.so.40)

$ FAKE_NCCL=2708 ask | grep libnccl
warning  libnccl            2.7.8 (libnccl.so.2)
$ FAKE_NVML_FAILS=9 ask | grep -A 1 libnvidia-ml
warning  libnvidia-ml       version unknown (libnvidia-ml.so.1)
                            -> it is there but does not answer, so it will not be used; without it: no GPU load, power and clocks in reports
$ FAKE_CUINIT=100 ask | grep -A 1 GPUs
missing  GPUs               CUDA does not start (error 100)
                            -> the driver is there but sees no GPU: training runs on the CPU; in a container start it with --gpus all
$ FAKE_CUINIT=803 ask | grep -A 1 GPUs
broken   GPUs               CUDA does not start (error 803)
                            -> kernel module and user library of the driver differ in version: reboot, or install both from one package
$ FAKE_CUINIT=802 ask | grep -A 1 GPUs
broken   GPUs               CUDA does not start (error 802)
                            -> system not ready: the fabric manager of this NVSwitch machine does not run (systemctl start nvidia-fabricmanager)
$ FAKE_CUINIT=77 ask | grep -A 1 GPUs
broken   GPUs               CUDA does not start (error 77)
                            -> the driver's error 77: look at nvidia-smi and dmesg
$ FAKE_CUINIT=803 LD_LIBRARY_PATH=$LF_CLI_FAKES loongforge doctor > /dev/null
? 1
