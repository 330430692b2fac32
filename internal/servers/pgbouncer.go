//go:build unix

package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"syscall"
	"time"
)

// PgBouncer is a private connection pooler in transaction mode.
type PgBouncer struct {
	folder   *folder
	port     int
	database string
	process  *process
}

// pgbouncerFolders are where packages put the program, off the PATH of ordinary users.
var pgbouncerFolders = []string{"/usr/sbin", "/opt/homebrew/bin", "/usr/local/bin"}

// StartPgBouncer starts a private pooler in front of the PostgreSQL server at the address, with so many server
// connections for each database, and waits until it answers. As root on Debian it installs the package
// when it is missing. The context bounds the start only.
func StartPgBouncer(ctx context.Context, postgresURL string, poolSize int) (*PgBouncer, error) {
	server, err := parseAddress(KindPostgreSQL, postgresURL)
	if err != nil {
		return nil, err
	}
	program, err := thisMachine().providePgBouncer(ctx)
	if err != nil {
		return nil, err
	}
	owner, err := serverUser(os.Geteuid(), user.Lookup)
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	folder, err := newFolder("pgbouncer", owner)
	if err != nil {
		return nil, err
	}
	p := &PgBouncer{folder: folder, port: ports[0], database: server.Path}
	if err := p.start(ctx, program, owner, pgbouncerConfig(p.port, server, poolSize)); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

// providePgBouncer finds the program, or installs it where that is possible.
func (m machine) providePgBouncer(ctx context.Context) (string, error) {
	if program, ok := m.findPgBouncer(); ok {
		return program, nil
	}
	if !m.isRoot || !m.isDebian {
		return "", errors.New("servers: no pgbouncer here; install it, on Debian and Ubuntu with: sudo apt-get install -y --no-install-recommends pgbouncer")
	}
	// Test programs of several packages run at once. The first installs it, the others find it then.
	lock, err := os.Create(filepath.Join(os.TempDir(), "inbox-test-install.lock"))
	if err != nil {
		return "", fmt.Errorf("servers: %w", err)
	}
	defer lock.Close() // and with it the lock
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("servers: %w", err)
	}
	if _, ok := m.findPgBouncer(); !ok {
		if err := installPackages(ctx, "pgbouncer"); err != nil {
			return "", err
		}
	}
	program, ok := m.findPgBouncer()
	if !ok {
		return "", errors.New("servers: the package pgbouncer has no program")
	}
	return program, nil
}

func (m machine) findPgBouncer() (string, bool) {
	if program, err := m.lookPath("pgbouncer"); err == nil {
		return program, true
	}
	return m.first(pgbouncerFolders, "pgbouncer")
}

// URL is the pooler's address, which lib/pq and pgx understand.
func (p *PgBouncer) URL() string {
	return fmt.Sprintf("postgres://postgres@%s%s?sslmode=disable", loopback(p.port), p.database)
}

// Stop ends the pooler and removes its folder.
func (p *PgBouncer) Stop() error {
	return errors.Join(p.process.end(syscall.SIGTERM, 15*time.Second), p.folder.remove())
}

func (p *PgBouncer) start(ctx context.Context, program string, owner *syscall.Credential, config string) error {
	file := p.folder.join("pgbouncer.ini")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		return fmt.Errorf("servers: %w", err)
	}
	log, err := openLog(p.folder)
	if err != nil {
		return err
	}
	cmd := exec.Command(program, file)
	cmd.Dir = p.folder.path
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + p.folder.path, "LC_ALL=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: owner}
	if p.process, err = startProcess(cmd, log, syscall.SIGQUIT); err != nil {
		return fmt.Errorf("servers: pgbouncer: %w", err)
	}
	err = p.process.await(ctx, 20*time.Second, func(ctx context.Context) error {
		_, err := greetPostgreSQL(ctx, loopback(p.port), "postgres", p.database[1:])
		return err
	})
	if err != nil {
		return startError(ctx, "pgbouncer", p.folder, err)
	}
	return nil
}

// pgbouncerConfig lets everybody in as the user of the server's address.
func pgbouncerConfig(port int, server *url.URL, poolSize int) string {
	login := "user=" + server.User.Username()
	if password, ok := server.User.Password(); ok {
		login += " password=" + password
	}
	host, serverPort, _ := net.SplitHostPort(hostPort(KindPostgreSQL, server)) // it was just joined
	return fmt.Sprintf(`[databases]
* = host=%s port=%s %s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = %d
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
`, host, serverPort, login, port, poolSize)
}
