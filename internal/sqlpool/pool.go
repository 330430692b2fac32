// Package sqlpool lets internal/engine work on database/sql. It links no driver.
package sqlpool

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
)

// Pool is an [engine.Pool] on a *sql.DB.
type Pool struct {
	db        *sql.DB
	txOptions *sql.TxOptions
	driver    engine.Driver
	failed    atomic.Pointer[error] // see failedTransaction
}

var (
	_ engine.Pool = (*Pool)(nil)
	_ engine.Tx   = (*Tx)(nil)
)

// New returns the pool. Messages' transactions are opened with the options.
func New(db *sql.DB, txOptions *sql.TxOptions) *Pool {
	_, fuses := db.Driver().(FusingDriver)
	return &Pool{db: db, txOptions: txOptions, driver: engine.Driver{NoticesEnd: isPQ(db.Driver()), ProvesWithCommit: fuses, Fuses: fuses}}
}

// isPQ reports whether the driver is lib/pq itself. It refuses to commit a transaction that has failed or ended;
// pgx's database/sql driver commits what a ROLLBACK sent as text has ended, and of others nothing is known.
func isPQ(d driver.Driver) bool {
	t := reflect.TypeOf(d)
	return t != nil && t.Kind() == reflect.Pointer && t.Elem().PkgPath() == "github.com/lib/pq"
}

// Driver implements [engine.Pool].
func (p *Pool) Driver() engine.Driver { return p.driver }

// Begin implements [engine.Pool].
func (p *Pool) Begin(ctx context.Context, opening engine.Opening) (engine.Tx, int64, error) {
	if p.driver.Fuses && opening.Guarded.Text != "" {
		fused := &Fused{Guarded: opening.Guarded.Text, Plain: opening.First.Text}
		tx, err := p.db.BeginTx(context.WithValue(ctx, fusedContextKey{}, fused), p.txOptions)
		if err != nil {
			return nil, 0, err
		}
		return &Tx{Tx: tx, pool: p, fused: fused}, fused.Affected, nil
	}
	tx, err := p.db.BeginTx(ctx, p.txOptions)
	if err != nil {
		return nil, 0, err
	}
	t := &Tx{Tx: tx, pool: p}
	affected, err := t.Exec(ctx, opening.First.Text, opening.First.Args...)
	if err != nil {
		_ = t.Rollback() // the error says more
		return nil, 0, err
	}
	return t, affected, nil
}

// BeginShort implements [engine.Pool].
func (p *Pool) BeginShort(ctx context.Context) (engine.Tx, error) {
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &Tx{Tx: tx, pool: p}, nil
}

// Exec implements [engine.Executor].
func (p *Pool) Exec(ctx context.Context, statement string, args ...any) (int64, error) {
	return exec(ctx, p.db, statement, args)
}

// Query implements [engine.Executor].
func (p *Pool) Query(ctx context.Context, query dialect.Query, destinations []any, each func() error) error {
	return read(ctx, p.db, query, destinations, each)
}

// Tx is an [engine.Tx] on a *sql.Tx, which is the handler's.
type Tx struct {
	*sql.Tx
	pool      *Pool  // nil in unit tests of handlers
	fused     *Fused // nil: it was not opened by a connector that fuses
	committed bool
}

// Exec implements [engine.Executor].
func (t *Tx) Exec(ctx context.Context, statement string, args ...any) (int64, error) {
	return exec(ctx, t.Tx, statement, args)
}

// Query implements [engine.Executor].
func (t *Tx) Query(ctx context.Context, query dialect.Query, destinations []any, each func() error) error {
	return read(ctx, t.Tx, query, destinations, each)
}

// Commit implements [engine.Tx]. *sql.Tx takes no context here; the proof travels behind its back.
func (t *Tx) Commit(_ context.Context, proof dialect.Query) error {
	if t.fused != nil {
		t.fused.Proof = proof.Text
	}
	err := t.Tx.Commit()
	t.committed = err == nil
	return err
}

// Rollback implements [engine.Tx]. There is nothing to do when database/sql has rolled back because the context
// has ended.
func (t *Tx) Rollback() error {
	if t.committed {
		return nil
	}
	return t.Tx.Rollback()
}

// IsBroken implements [engine.Tx]. Lib/pq refuses by itself to commit or to roll back what has failed or ended, with
// errors that have no code and no type; every other error of it is the server's, the network's or database/sql's.
func (t *Tx) IsBroken(err error) bool {
	if errors.Is(err, driver.ErrBadConn) {
		return false
	}
	if errors.Is(err, sql.ErrTxDone) {
		return true
	}
	var (
		server  interface{ SQLState() string }
		network net.Error
	)
	return t.pool != nil && t.pool.driver.NoticesEnd && !errors.As(err, &server) && !errors.As(err, &network) &&
		!errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, net.ErrClosed) &&
		!errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
}

// IsEnded implements [engine.Tx].
func (t *Tx) IsEnded(err error) bool {
	if errors.Is(err, sql.ErrTxDone) {
		return true
	}
	if !t.IsBroken(err) {
		return false
	}
	failed := t.pool.failedTransaction()
	return failed != nil && !errors.Is(err, failed)
}

// failedTransaction is lib/pq's error of a commit after a failed statement; nil when it cannot be learned now. It is a
// variable of lib/pq, and naming it would link lib/pq into programs that use another driver, so a transaction is made
// to fail, once.
func (p *Pool) failedTransaction() error {
	if known := p.failed.Load(); known != nil {
		return *known
	}
	ctx, cancel := context.WithTimeout(context.Background(), learnTimeout)
	defer cancel()
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return nil
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(ctx, `SELECT 1/0`); err == nil || ctx.Err() != nil {
		return nil
	}
	failed := tx.Commit()
	if failed == nil || ctx.Err() != nil || errors.Is(failed, driver.ErrBadConn) {
		return nil
	}
	p.failed.Store(&failed)
	return failed
}

const learnTimeout = 5 * time.Second

type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

func exec(ctx context.Context, on execer, statement string, args []any) (int64, error) {
	result, err := on.ExecContext(ctx, statement, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func read(ctx context.Context, on queryer, query dialect.Query, destinations []any, each func() error) error {
	rows, err := on.QueryContext(ctx, query.Text, query.Args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(destinations...); err != nil {
			return err
		}
		if err := each(); err != nil {
			return err
		}
	}
	return rows.Err()
}
