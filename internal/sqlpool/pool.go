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
		t, err := p.begin(context.WithValue(ctx, fusedContextKey{}, fused), p.txOptions)
		if err != nil {
			return nil, 0, err
		}
		t.fused = fused
		return t, fused.Affected, nil
	}
	t, err := p.begin(ctx, p.txOptions)
	if err != nil {
		return nil, 0, err
	}
	affected, err := t.Exec(ctx, opening.First.Text, opening.First.Args...)
	if err != nil {
		_ = t.Rollback() // the error says more
		return nil, 0, err
	}
	return t, affected, nil
}

// BeginShort implements [engine.Pool].
func (p *Pool) BeginShort(ctx context.Context) (engine.Tx, error) {
	t, err := p.begin(ctx, nil)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// begin opens a transaction on a connection that can be closed afterwards. Through *sql.DB it could not be reached.
func (p *Pool) begin(ctx context.Context, options *sql.TxOptions) (*Tx, error) {
	conn, err := p.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	tx, err := conn.BeginTx(ctx, options)
	switch {
	case errors.Is(err, driver.ErrBadConn):
		// It was dead and is gone. *sql.DB tries others, and a new one at last.
		if tx, err = p.db.BeginTx(ctx, options); err != nil {
			return nil, err
		}
		return &Tx{Tx: tx, pool: p}, nil
	case err != nil:
		giveBack(conn, dialect.CannotWrite(err))
		return nil, err
	}
	// When the context ends, database/sql rolls back: then a handler that has not returned holds no connection.
	stop := context.AfterFunc(ctx, func() { giveBack(conn, false) })
	return &Tx{Tx: tx, pool: p, conn: conn, stop: stop}, nil
}

// giveBack gives a connection back to the pool, or closes it. The second time it does nothing.
func giveBack(conn *sql.Conn, unfit bool) {
	if unfit {
		_ = conn.Raw(func(any) error { return driver.ErrBadConn })
	}
	_ = conn.Close()
}

// Exec implements [engine.Executor].
func (p *Pool) Exec(ctx context.Context, statement string, args ...any) (int64, error) {
	return exec(ctx, p.db, statement, args)
}

// Query implements [engine.Executor].
func (p *Pool) Query(ctx context.Context, query dialect.Query, destinations []any, each func() error) error {
	conn, err := p.db.Conn(ctx)
	if err != nil {
		return err
	}
	rows, err := conn.QueryContext(ctx, query.Text, query.Args...)
	if errors.Is(err, driver.ErrBadConn) {
		rows, err = p.db.QueryContext(ctx, query.Text, query.Args...) // as in begin
	}
	if err == nil {
		err = read(rows, destinations, each)
	}
	giveBack(conn, dialect.CannotWrite(err))
	return err
}

// Tx is an [engine.Tx] on a *sql.Tx, which is the handler's.
type Tx struct {
	*sql.Tx
	pool      *Pool  // nil in unit tests of handlers
	fused     *Fused // nil: it was not opened by a connector that fuses
	committed bool
	conn      *sql.Conn   // nil: the pool has it back as soon as the transaction ends
	stop      func() bool // giving back conn with the context
	unfit     bool        // see dialect.CannotWrite
}

// Exec implements [engine.Executor].
func (t *Tx) Exec(ctx context.Context, statement string, args ...any) (int64, error) {
	affected, err := exec(ctx, t.Tx, statement, args)
	t.unfit = t.unfit || dialect.CannotWrite(err)
	return affected, err
}

// Query implements [engine.Executor].
func (t *Tx) Query(ctx context.Context, query dialect.Query, destinations []any, each func() error) error {
	rows, err := t.Tx.QueryContext(ctx, query.Text, query.Args...)
	if err == nil {
		err = read(rows, destinations, each)
	}
	t.unfit = t.unfit || dialect.CannotWrite(err)
	return err
}

// Commit implements [engine.Tx]. *sql.Tx takes no context here; the proof travels behind its back.
func (t *Tx) Commit(_ context.Context, proof dialect.Query) error {
	if t.fused != nil {
		t.fused.Proof = proof.Text
	}
	defer t.giveBack()
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
	defer t.giveBack()
	return t.Tx.Rollback()
}

func (t *Tx) giveBack() {
	if t.conn != nil {
		t.stop()
		giveBack(t.conn, t.unfit)
	}
}

// IsBroken implements [engine.Tx]. Lib/pq refuses by itself to commit or to roll back what has failed or ended, with
// errors that have no code and no type; every other error of it is the server's, the network's or database/sql's.
func (t *Tx) IsBroken(err error) bool {
	if errors.Is(err, driver.ErrBadConn) {
		return false
	}
	if errors.Is(err, sql.ErrTxDone) || errors.Is(err, ErrCopyOpen) {
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
	if !t.IsBroken(err) || errors.Is(err, ErrCopyOpen) {
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

func read(rows *sql.Rows, destinations []any, each func() error) error {
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
