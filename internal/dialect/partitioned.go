package dialect

import (
	"errors"
	"fmt"
	"strings"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// ErrNoPartition is partitions.ErrNoPartition.
var ErrNoPartition = errors.New("no partition for the message id: partition missing or clock skew")

// Partitioned is the [Dialect] of a table of PostgreSQL 14 and later that is partitioned by the time in its message
// ids. It takes only ids of its kind, in their canonical spelling: any other text sorts into a window that is not
// its time's, and would run again when that window is retired.
type Partitioned struct {
	PostgreSQL
	IDs inbox.IDKind
}

var (
	_ Dialect        = Partitioned{}
	_ KeyChecker     = Partitioned{}
	_ ClaimExplainer = Partitioned{}
)

// CheckKey implements [KeyChecker].
func (p Partitioned) CheckKey(key inbox.Key) error {
	if !p.IDs.Valid() {
		return nil // Check says so, and it is not the message's fault
	}
	if _, ok := p.IDs.Time(key.MessageID); !ok {
		return fmt.Errorf("%w: message id %q is not a %s in its canonical spelling", inbox.ErrInvalidKey, key.MessageID, p.IDs)
	}
	return nil
}

// ExplainClaim implements [ClaimExplainer]. It asks the catalog and trusts no clock of a client: when nobody has
// made partitions for a week, a fresh message must not be taken for an old one.
func (p Partitioned) ExplainClaim(table Table, key inbox.Key, err error, texts func(Query) ([]string, error)) error {
	if SQLState(err) != StateCheckViolation {
		return err
	}
	id := key.MessageID
	at, ok := p.IDs.Time(id)
	if !ok {
		return err
	}
	list, lookErr := texts(p.windowQuery(table))
	if lookErr != nil {
		return fmt.Errorf("%w: the id's time is %s; the partitions cannot be read: %w: %w", ErrNoPartition, UTC(at), lookErr, err)
	}
	window, lookErr := p.parseWindow(list)
	switch {
	case lookErr != nil:
		return fmt.Errorf("%w: the id's time is %s: %w: %w", ErrNoPartition, UTC(at), lookErr, err)
	case window.covers(id):
		return err // a constraint of the user's; or the partition has come meanwhile, and a retry finds it
	case window.isBelow(id):
		return fmt.Errorf("%w: the id's time is %s, the partitions hold %s: %w", inbox.ErrTooOld, UTC(at), window.text(p.IDs), err)
	}
	return fmt.Errorf("%w: the id's time is %s, the partitions hold %s: %w", ErrNoPartition, UTC(at), window.text(p.IDs), err)
}

// StateCheckViolation is the SQLSTATE of a violated constraint, and of a row for which there is no partition.
const StateCheckViolation = "23514"

// UTC is a time for an error's text.
func UTC(at time.Time) string { return at.UTC().Format("2006-01-02T15:04:05.000Z") }

// Schema implements [Dialect]. It makes no partition; package partitions does.
func (Partitioned) Schema(table Table) []Query {
	return postgreSQLSchema("postgresql_partitioned", table)
}

// Check implements [Dialect]: all that a plain table is checked for, the shape of the partitions, and that there is
// one for the present.
func (p Partitioned) Check(table Table) Query {
	query := p.CheckShape(table)
	if p.IDs.Valid() {
		query.Text += strings.ReplaceAll(presentCheck, "$present", present(p.IDs))
	}
	return query
}

// CheckShape asks for what must be right before partitions are made. The bounds declare the kind of the ids in
// the database.
func (p Partitioned) CheckShape(table Table) Query {
	query := p.PostgreSQL.Check(table)
	if !p.IDs.Valid() {
		query.Text += ` UNION ALL SELECT 'the kind of its ids is not set: IDs must be UUIDv7 or ULID'`
		return query
	}
	query.Text += collationCheck + strings.NewReplacer("$kind", p.IDs.String(), "$pattern", Literal(pattern(p.IDs))).Replace(shapeCheck)
	return query
}

// CheckConvertible asks for what must be right before a plain table is converted.
func (p Partitioned) CheckConvertible(table Table) Query {
	query := p.PostgreSQL.Check(table)
	query.Text += collationCheck + convertCheck
	return query
}

// pattern is the canonical spelling as a regular expression of PostgreSQL.
func pattern(kind inbox.IDKind) string {
	if kind == inbox.UUIDv7 {
		return `^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`
	}
	return `^[0-7][0-9A-HJKMNP-TV-Z]{25}$`
}

// present is the kind's Bound of the database's time, as an expression of PostgreSQL.
func present(kind inbox.IDKind) string {
	const milliseconds = `(extract(epoch FROM now()) * 1000)::bigint`
	if kind == inbox.UUIDv7 {
		return `overlay(lpad(to_hex(` + milliseconds + `), 12, '0') PLACING '-' FROM 9 FOR 0) || '-7000-8000-000000000000'`
	}
	return `(SELECT string_agg(substr('0123456789ABCDEFGHJKMNPQRSTVWXYZ', (` + milliseconds + ` >> (5 * i) & 31)::int + 1, 1), '' ORDER BY i DESC) ` +
		`FROM generate_series(0, 9) AS i) || '0000000000000000'`
}

const shapeCheck = `
UNION ALL
SELECT 'it is not partitioned by RANGE (message_id): let Partitions make it, or convert the plain table with Partitions.Convert'
FROM inbox LEFT JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = inbox.oid
WHERE p.partstrat IS DISTINCT FROM 'r' OR p.partnatts <> 1
	OR p.partattrs[0] IS DISTINCT FROM (SELECT attnum FROM key WHERE attname = 'message_id')
UNION ALL
SELECT 'it has a DEFAULT partition, in which messages that are too old would be new'
FROM inbox JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = inbox.oid WHERE p.partdefid <> 0
UNION ALL
SELECT 'partition ' || c.oid::pg_catalog.regclass || ' is itself partitioned'
FROM inbox JOIN pg_catalog.pg_inherits i ON i.inhparent = inbox.oid JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
WHERE c.relkind <> 'r'
UNION ALL
SELECT 'partition ' || c.oid::pg_catalog.regclass || ' has the bound ' || bound[1] || ', which is not a $kind: the table is for ids of another kind'
FROM inbox JOIN pg_catalog.pg_inherits i ON i.inhparent = inbox.oid JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid,
	pg_catalog.regexp_matches(pg_catalog.pg_get_expr(c.relpartbound, c.oid), '''([^'']*)''', 'g') AS bound
WHERE bound[1] !~ $pattern`

const collationCheck = `
UNION ALL
SELECT 'message_id must be COLLATE "C", or the partitions are not in the order of the ids'
FROM inbox JOIN key ON attname = 'message_id' LEFT JOIN pg_catalog.pg_collation c ON c.oid = attcollation
WHERE c.collname IS NULL OR c.collname NOT IN ('C', 'POSIX')`

const presentCheck = `
UNION ALL
SELECT 'there is no partition for the present: let Partitions run'
FROM inbox
WHERE relkind = 'p' AND NOT EXISTS (
	SELECT FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid,
		pg_catalog.regexp_match(pg_catalog.pg_get_expr(c.relpartbound, c.oid), '^FOR VALUES FROM \((?:''(.*)''|MINVALUE)\) TO \((?:''(.*)''|MAXVALUE)\)$') AS bound,
		(SELECT $present) AS present (id)
	WHERE i.inhparent = inbox.oid AND NOT i.inhdetachpending AND bound IS NOT NULL
		AND (bound[1] IS NULL OR bound[1] COLLATE "C" <= id) AND (bound[2] IS NULL OR id < bound[2] COLLATE "C")
)`

const convertCheck = `
UNION ALL
SELECT 'it has the trigger ' || tgname FROM inbox JOIN pg_catalog.pg_trigger ON tgrelid = inbox.oid WHERE NOT tgisinternal
UNION ALL
SELECT 'it has the rule ' || rulename FROM inbox JOIN pg_catalog.pg_rewrite ON ev_class = inbox.oid
UNION ALL
SELECT 'it has row level security' FROM inbox JOIN pg_catalog.pg_class c ON c.oid = inbox.oid WHERE c.relrowsecurity
UNION ALL
SELECT 'it inherits or is inherited from' FROM inbox WHERE EXISTS (SELECT FROM pg_catalog.pg_inherits WHERE inbox.oid IN (inhparent, inhrelid))
UNION ALL
SELECT 'it has the foreign key ' || conname FROM inbox JOIN pg_catalog.pg_constraint ON inbox.oid IN (conrelid, confrelid) WHERE contype = 'f'
UNION ALL
SELECT 'it has the constraint ' || conname || ', which is not validated' FROM inbox JOIN pg_catalog.pg_constraint ON conrelid = inbox.oid WHERE NOT convalidated
UNION ALL
SELECT 'the view ' || r.ev_class::pg_catalog.regclass || ' depends on it'
FROM inbox JOIN pg_catalog.pg_depend d ON d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = inbox.oid AND d.classid = 'pg_catalog.pg_rewrite'::regclass
	JOIN pg_catalog.pg_rewrite r ON r.oid = d.objid AND r.ev_class <> inbox.oid
GROUP BY r.ev_class
UNION ALL
SELECT 'it is in the publication ' || pubname
FROM inbox JOIN pg_catalog.pg_publication_rel r ON r.prrelid = inbox.oid JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid`
