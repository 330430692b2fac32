//go:build unix

package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// PostgreSQL is a private PostgreSQL server. Its methods may be called from
// several goroutines.
type PostgreSQL struct {
	programs postgresqlPrograms
	folder   *folder
	port     int
	user     *syscall.Credential // nil: our own

	mu      sync.Mutex
	process *process
	version string
	stopped bool
}

// StartPostgreSQL starts a private server and waits until it accepts queries.
// The context bounds the start only. The server commits as a default one does:
// fsync and synchronous_commit are on. Everybody on this machine may connect to
// it, without a password.
func StartPostgreSQL(ctx context.Context) (*PostgreSQL, error) {
	programs, ok := thisMachine().findPostgreSQL()
	if !ok {
		return nil, missingError([]Kind{KindPostgreSQL})
	}
	owner, err := serverUser(os.Geteuid(), user.Lookup)
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	folder, err := newFolder(KindPostgreSQL, owner)
	if err != nil {
		return nil, err
	}
	p := &PostgreSQL{programs: programs, folder: folder, port: ports[0], user: owner}
	err = p.initialize(ctx)
	if err == nil {
		err = p.Restart(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

// URL is the server's address, which lib/pq and pgx understand.
func (p *PostgreSQL) URL() string {
	return fmt.Sprintf("postgres://postgres@%s/postgres?sslmode=disable", loopback(p.port))
}

// Version is the server's version as it tells it.
func (p *PostgreSQL) Version() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.version
}

// Shutdown ends the server cleanly and keeps its data: sessions are cut off,
// their open transactions rolled back.
func (p *PostgreSQL) Shutdown() error {
	return p.end(syscall.SIGINT, 30*time.Second)
}

// Kill ends the server at once, as a crash would, and keeps its data: the next
// start recovers from the write-ahead log.
func (p *PostgreSQL) Kill() error {
	return p.end(syscall.SIGQUIT, 15*time.Second)
}

// Restart shuts the server down if it runs, starts it on the same port and data
// and waits until it accepts queries. The context bounds the start only.
func (p *PostgreSQL) Restart(ctx context.Context) error {
	if err := p.Shutdown(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return errStopped
	}
	return p.start(ctx)
}

// Stop ends the server for good and removes its folder. Further calls do nothing.
func (p *PostgreSQL) Stop() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return nil
	}
	p.stopped = true
	// The data is thrown away: nothing is gained by a checkpoint.
	return errors.Join(p.process.end(syscall.SIGQUIT, 15*time.Second), p.folder.remove())
}

// end ends the running server with a signal.
func (p *PostgreSQL) end(signal syscall.Signal, grace time.Duration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.process.end(signal, grace)
}

// initialize creates the data folder and the two files that configure it.
func (p *PostgreSQL) initialize(ctx context.Context) error {
	// Without --no-sync initdb would wait for the disk to hold files that are
	// of no use after a crash of the machine. The server itself does sync.
	initdb := p.command(exec.CommandContext(ctx, p.programs.initdb,
		"--pgdata", p.data(), "--username", "postgres", "--auth", "trust",
		"--encoding", "UTF8", "--locale", "C", "--no-sync"))
	if err := run(ctx, initdb); err != nil {
		return fmt.Errorf("servers: PostgreSQL: %w", err)
	}
	for name, text := range map[string]string{
		"postgresql.conf": postgresqlConfig(p.port),
		"pg_hba.conf":     postgresqlAccess,
	} {
		if err := os.WriteFile(filepath.Join(p.data(), name), []byte(text), 0o600); err != nil {
			return fmt.Errorf("servers: PostgreSQL: %w", err)
		}
	}
	return nil
}

// start starts the server and waits until it is ready.
func (p *PostgreSQL) start(ctx context.Context) error {
	log, err := openLog(p.folder)
	if err != nil {
		return err
	}
	p.process, err = startProcess(p.command(exec.Command(p.programs.postgres, "-D", p.data())), log, syscall.SIGQUIT)
	if err != nil {
		return fmt.Errorf("servers: PostgreSQL: %w", err)
	}
	err = p.process.await(ctx, time.Minute, func(ctx context.Context) (err error) {
		p.version, err = greetPostgreSQL(ctx, loopback(p.port), "postgres", "postgres")
		return err
	})
	if err != nil {
		return startError(ctx, "PostgreSQL", p.folder, err, p.process.end(syscall.SIGQUIT, 15*time.Second))
	}
	return nil
}

// command gives a program of the server its user and surroundings.
func (p *PostgreSQL) command(cmd *exec.Cmd) *exec.Cmd {
	cmd.Dir = p.folder.path
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + p.folder.path, "LC_ALL=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.user}
	return cmd
}

func (p *PostgreSQL) data() string { return p.folder.join("data") }

// postgresqlAccess admits everybody on the loopback address and nobody else.
const postgresqlAccess = "host all all 127.0.0.1/32 trust\n"

// postgresqlConfig is the server's whole configuration. Settings that are not
// here have their defaults, synchronous_commit among them.
func postgresqlConfig(port int) string {
	return fmt.Sprintf(`listen_addresses = '127.0.0.1'
port = %d
unix_socket_directories = ''
max_connections = 200
max_prepared_transactions = 0
fsync = on
lc_messages = 'C'
log_line_prefix = '%%m [%%p] '
`, port)
}

// serverUser is the user as which the server runs: PostgreSQL refuses root.
func serverUser(uid int, lookup func(string) (*user.User, error)) (*syscall.Credential, error) {
	if uid != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err1 == nil && err2 == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, errors.New("servers: PostgreSQL refuses to run as root, and there is no user postgres or nobody")
}
