//go:build unix

package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// RabbitMQ is a private RabbitMQ server. Its methods may be called from several
// goroutines.
type RabbitMQ struct {
	programs rabbitmqPrograms
	folder   *folder
	ports    rabbitmqPorts

	mu      sync.Mutex
	epmd    *process // Erlang's port mapper, which outlives restarts
	process *process
	version string
	stopped bool
}

// rabbitmqPorts are the ports of one server.
type rabbitmqPorts struct{ amqp, distribution, epmd int }

// StartRabbitMQ starts a private server, without any plugin, and waits until it
// speaks AMQP. The context bounds the start only.
func StartRabbitMQ(ctx context.Context) (*RabbitMQ, error) {
	programs, ok := thisMachine().findRabbitMQ()
	if !ok {
		return nil, missingError([]Kind{KindRabbitMQ})
	}
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	folder, err := newFolder(KindRabbitMQ, nil)
	if err != nil {
		return nil, err
	}
	r := &RabbitMQ{programs: programs, folder: folder, ports: rabbitmqPorts{ports[0], ports[1], ports[2]}}
	err = r.initialize()
	if err == nil {
		err = r.Restart(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, r.Stop())
	}
	return r, nil
}

// URI is the server's address.
func (r *RabbitMQ) URI() string {
	return fmt.Sprintf("amqp://guest:guest@%s/", loopback(r.ports.amqp))
}

// Version is the server's version as it tells it.
func (r *RabbitMQ) Version() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.version
}

// Shutdown ends the server cleanly and keeps its data.
func (r *RabbitMQ) Shutdown() error {
	return r.end(syscall.SIGTERM, time.Minute)
}

// Kill ends the server at once, as a crash would, and keeps its data.
func (r *RabbitMQ) Kill() error {
	return r.end(syscall.SIGKILL, 15*time.Second)
}

// Restart shuts the server down if it runs, starts it on the same port and data
// and waits until it speaks AMQP. The context bounds the start only.
func (r *RabbitMQ) Restart(ctx context.Context) error {
	if err := r.Shutdown(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return errStopped
	}
	return r.start(ctx)
}

// Stop ends the server for good and removes its folder. Further calls do nothing.
func (r *RabbitMQ) Stop() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return nil
	}
	r.stopped = true
	// The data is thrown away: nothing is gained by a clean end.
	return errors.Join(
		r.process.end(syscall.SIGKILL, 15*time.Second),
		r.epmd.end(syscall.SIGKILL, 15*time.Second),
		r.folder.remove(),
	)
}

// end ends the running server with a signal.
func (r *RabbitMQ) end(signal syscall.Signal, grace time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.process.end(signal, grace)
}

// initialize writes the files that the server reads instead of the system's.
func (r *RabbitMQ) initialize() error {
	for name, text := range rabbitmqFiles(r.ports) {
		if err := os.WriteFile(r.folder.join(name), []byte(text), 0o600); err != nil {
			return fmt.Errorf("servers: RabbitMQ: %w", err)
		}
	}
	return nil
}

// start starts the port mapper, unless it runs, and the server, and waits until
// both are ready.
func (r *RabbitMQ) start(ctx context.Context) error {
	if err := r.startEpmd(ctx); err != nil {
		return startError(ctx, "RabbitMQ's epmd", r.folder, err)
	}
	log, err := openLog(r.folder)
	if err != nil {
		return err
	}
	r.process, err = startProcess(r.command(exec.Command(r.programs.server)), log, syscall.SIGKILL)
	if err != nil {
		return fmt.Errorf("servers: RabbitMQ: %w", err)
	}
	err = r.process.await(ctx, 2*time.Minute, func(ctx context.Context) (err error) {
		r.version, err = greetRabbitMQ(ctx, loopback(r.ports.amqp))
		return err
	})
	if err != nil {
		return startError(ctx, "RabbitMQ", r.folder, err, r.process.end(syscall.SIGKILL, 15*time.Second))
	}
	return nil
}

// startEpmd starts the port mapper in our hands. A server that finds none starts
// one that stays behind after it.
func (r *RabbitMQ) startEpmd(ctx context.Context) error {
	if r.epmd.running() {
		return nil
	}
	log, err := openLog(r.folder)
	if err != nil {
		return err
	}
	r.epmd, err = startProcess(r.command(exec.Command(r.programs.epmd)), log, syscall.SIGKILL)
	if err != nil {
		return err
	}
	return r.epmd.await(ctx, 20*time.Second, func(ctx context.Context) error {
		conn, err := dial(ctx, loopback(r.ports.epmd))
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

// command gives a program of the server its surroundings.
func (r *RabbitMQ) command(cmd *exec.Cmd) *exec.Cmd {
	cmd.Dir = r.folder.path
	cmd.Env = rabbitmqEnvironment(r.folder.path, os.Getenv("PATH"), r.ports)
	return cmd
}

// rabbitmqFiles are the configuration files by name.
func rabbitmqFiles(ports rabbitmqPorts) map[string]string {
	return map[string]string{
		"rabbitmq.conf":     fmt.Sprintf("listeners.tcp.1 = %s\n", loopback(ports.amqp)),
		"advanced.config":   "[].\n",
		"enabled_plugins":   "[].\n",
		"rabbitmq-env.conf": "",
	}
}

// rabbitmqEnvironment is the whole environment of a server: nothing is inherited
// that could point at another server's folders, ports or cookie.
func rabbitmqEnvironment(folder, path string, ports rabbitmqPorts) []string {
	in := func(name string) string { return folder + "/" + name }
	return []string{
		"PATH=" + path,
		"HOME=" + folder, // of .erlang.cookie
		"LC_ALL=C.UTF-8",

		"ERL_EPMD_PORT=" + strconv.Itoa(ports.epmd),
		"ERL_EPMD_ADDRESS=127.0.0.1",

		// A name with an address works where no name can be resolved.
		"RABBITMQ_NODENAME=watermill-inbox-" + strconv.Itoa(ports.amqp) + "@127.0.0.1",
		"RABBITMQ_USE_LONGNAME=true",
		"RABBITMQ_NODE_IP_ADDRESS=127.0.0.1",
		"RABBITMQ_NODE_PORT=" + strconv.Itoa(ports.amqp),
		"RABBITMQ_DIST_PORT=" + strconv.Itoa(ports.distribution),
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",

		"RABBITMQ_CONF_ENV_FILE=" + in("rabbitmq-env.conf"),
		"RABBITMQ_CONFIG_FILE=" + in("rabbitmq.conf"),
		"RABBITMQ_CONFIG_FILES=" + in("conf.d"),
		"RABBITMQ_ADVANCED_CONFIG_FILE=" + in("advanced.config"),
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + in("enabled_plugins"),
		"RABBITMQ_MNESIA_BASE=" + in("mnesia"),
		"RABBITMQ_LOG_BASE=" + in("logs"),
		"RABBITMQ_LOGS=-", // to its output, which is our log
		"RABBITMQ_PID_FILE=" + in("pid"),

		// The start script then becomes the server instead of waiting for it
		// as a parent, so that signals reach the server itself.
		"RUNNING_UNDER_SYSTEMD=true",
	}
}
