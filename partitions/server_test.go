package partitions

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// oldServer is a server that is too old. It notes what it is asked.
type oldServer struct{ statements []string }

func (s *oldServer) Connect(context.Context) (driver.Conn, error) { return s, nil }
func (s *oldServer) Driver() driver.Driver                        { return nil }
func (s *oldServer) Close() error                                 { return nil }
func (s *oldServer) Prepare(string) (driver.Stmt, error)          { return nil, errors.New("not prepared") }
func (s *oldServer) Begin() (driver.Tx, error)                    { return s, nil }
func (s *oldServer) Commit() error                                { return nil }
func (s *oldServer) Rollback() error                              { return nil }

func (s *oldServer) ExecContext(_ context.Context, statement string, _ []driver.NamedValue) (driver.Result, error) {
	s.statements = append(s.statements, statement)
	return driver.ResultNoRows, nil
}

func (s *oldServer) QueryContext(_ context.Context, statement string, _ []driver.NamedValue) (driver.Rows, error) {
	s.statements = append(s.statements, statement)
	return &rows{left: strings.Contains(statement, "server_version_num")}, nil
}

// rows are at most one.
type rows struct{ left bool }

func (*rows) Columns() []string { return []string{"problem"} }
func (*rows) Close() error      { return nil }
func (r *rows) Next(values []driver.Value) error {
	if !r.left {
		return io.EOF
	}
	r.left, values[0] = false, "the server is too old"
	return nil
}

func TestAnOldServerIsNotTouched(t *testing.T) {
	t.Parallel()
	for name, do := range map[string]func(*Partitions, context.Context) error{
		"Convert": (*Partitions).Convert,
		"Pass":    func(p *Partitions, ctx context.Context) error { _, err := p.Pass(ctx); return err },
	} {
		server := &oldServer{}
		db := sql.OpenDB(server)
		defer db.Close()
		p, err := New(db, Options{IDs: inbox.UUIDv7, Retention: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		var refused *inbox.CheckError
		if err := do(p, context.Background()); !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
		for _, statement := range server.statements {
			if !strings.HasPrefix(statement, "SELECT") {
				t.Errorf("%s ran %s", name, statement)
			}
		}
	}
}
