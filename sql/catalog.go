package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lib/pq"
)

// querier is a pool or a transaction.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// plan lists the partitions, and tells the database's time.
func (p *Partitions) plan(ctx context.Context, on querier) (plan, time.Time, error) {
	o := p.options
	plan := plan{kind: o.IDs, width: o.Width, ahead: o.Ahead, retention: o.Retention}
	now, err := p.now(ctx, on)
	if err != nil {
		return plan, now, err
	}
	var (
		part   partition
		bounds string
	)
	columns := []any{&part.name.schema, &part.name.name, &bounds, &part.attached, &part.pending, &part.comment}
	err = readRows(ctx, on, listQuery(p.table()), columns, func() (err error) {
		switch {
		case part.attached && bounds == "":
			return nil // dropped while it was being listed
		case part.attached:
			part.retired = strings.HasPrefix(part.comment, markStart)
			part.idRange, err = o.IDs.parseRange(bounds)
		default:
			if part.idRange, part.retired = part.readMark(p.table(), o.IDs); !part.retired {
				return nil // another table's, or renamed
			}
		}
		plan.partitions = append(plan.partitions, part)
		return err
	})
	if err != nil {
		return plan, now, fmt.Errorf("inboxsql: cannot list the partitions: %w", err)
	}
	slices.SortFunc(plan.partitions, partition.compare)
	return plan, now, nil
}

// now is the database's time.
func (p *Partitions) now(ctx context.Context, on querier) (time.Time, error) {
	var milliseconds int64
	err := readRows(ctx, on, `SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint`, []any{&milliseconds}, func() error { return nil })
	if err != nil {
		return time.Time{}, fmt.Errorf("inboxsql: cannot read the time: %w", err)
	}
	return time.UnixMilli(milliseconds).UTC(), nil
}

func readRows(ctx context.Context, on querier, query string, scans []any, each func() error) error {
	rows, err := on.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(scans...); err != nil {
			return err
		}
		if err := each(); err != nil {
			return err
		}
	}
	return rows.Err()
}

// create makes the partitions that are missing, each in a transaction of its own. CREATE TABLE ... PARTITION OF
// would lock the whole table, and every claim would wait behind it for the longest open handler; to attach a table
// that nobody knows yet does not.
func (p *Partitions) create(ctx context.Context, pass *PartitionsPass) error {
	plan, now, err := p.plan(ctx, p.db)
	if err != nil {
		return err
	}
	var errs []error
	for _, bounds := range plan.missing(now) {
		at, _ := p.options.IDs.Time(bounds.low)
		part := partition{idRange: bounds, name: p.table().partition(at)}
		created := false
		err := p.alter(ctx, func(tx *sql.Tx) error {
			plan, _, err := p.plan(ctx, tx)
			if err != nil {
				return err
			}
			if !slices.Equal(plan.without(bounds), []idRange{bounds}) {
				return nil // another instance has made it
			}
			created = true
			if err := execAll(ctx, tx, `CREATE TABLE `+part.name.Quoted()+` (LIKE `+p.table().Quoted()+` INCLUDING ALL)`); err != nil {
				return err
			}
			if err := execTexts(ctx, tx, ownerQuery(p.table(), part.name)); err != nil {
				return err
			}
			return execAll(ctx, tx, p.attach(part))
		})
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			errs = append(errs, fmt.Errorf("inboxsql: cannot make partition %s: %w", part.name.name, err))
		case created:
			pass.Created = append(pass.Created, part.name.name)
		}
	}
	return errors.Join(errs...)
}

func (p *Partitions) attach(part partition) string {
	return `ALTER TABLE ` + p.table().Quoted() + ` ATTACH PARTITION ` + part.name.Quoted() + ` ` + part.sql()
}

// alterPatience bounds the wait for other instances and for maintenance like VACUUM. No claim waits meanwhile.
const alterPatience = 10 * time.Second

// alter runs a short transaction that has the table's partitions for itself among all instances: by the lock
// that attaching takes anyway, which no claim waits for.
func (p *Partitions) alter(ctx context.Context, do func(*sql.Tx) error) error {
	return p.locked(ctx, "SHARE UPDATE EXCLUSIVE", alterPatience, do)
}

func (p *Partitions) locked(ctx context.Context, mode string, patience time.Duration, do func(*sql.Tx) error) error {
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	err = execAll(ctx, tx,
		fmt.Sprintf(`SET LOCAL lock_timeout = %d`, patience.Milliseconds()),
		`LOCK TABLE ONLY `+p.table().Quoted()+` IN `+mode+` MODE`)
	if err != nil {
		return err
	}
	if err := do(tx); err != nil {
		return err
	}
	return tx.Commit()
}

func execAll(ctx context.Context, tx *sql.Tx, statements ...string) error {
	for _, statement := range statements {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	return nil
}

// execTexts runs the statements that a query selects.
func execTexts(ctx context.Context, tx *sql.Tx, query string) error {
	var (
		statement  string
		statements []string
	)
	err := readRows(ctx, tx, query, []any{&statement}, func() error {
		statements = append(statements, statement)
		return nil
	})
	if err != nil {
		return err
	}
	return execAll(ctx, tx, statements...)
}

// ownerQuery selects the statement that gives a new table the owner of another, if that is somebody else.
func ownerQuery(from, to Table) string {
	return `SELECT format(` + pq.QuoteLiteral(`ALTER TABLE `+to.Quoted()+` OWNER TO %I`) + `, pg_get_userbyid(relowner)) ` +
		`FROM pg_catalog.pg_class WHERE oid = ` + regclass(from) + ` AND pg_get_userbyid(relowner) <> current_user`
}

func regclass(table Table) string {
	return `pg_catalog.to_regclass(` + pq.QuoteLiteral(table.Quoted()) + `)`
}
