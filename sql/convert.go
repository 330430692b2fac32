package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/lib/pq"
)

// Convert makes a partitioned table of a plain one, while services claim in it: the table becomes the first
// partition under its name with _old at the end, from the beginning to a bound in the future, and is retired as a
// whole when that is older than the retention. Until then no id is too old for it. No record is copied. A table that is partitioned already is left as it is, but for missing
// partitions.
//
// It first adds a CHECK that all ids are of the kind and below the bound, and validates it, beside claims. Twice, to
// add that and to change places, it needs the table for itself: while it waits for open transactions, of handlers and
// of readers, new claims wait too, for a tenth of a second at first and never for more than five seconds in a row. If handlers are open all
// the time and take longer, it goes on trying until the context ends. Meanwhile claims with other ids fail, and their
// messages stay with the broker.
//
// It refuses a table that has records with other ids, with their number, and one with triggers, rules, views,
// foreign keys, policies or publications, which would not move along. Grants and the owner do. An error leaves the
// plain table as it was. If it is interrupted, by the context's end or a crash, call it again: the CHECK stays,
// and would refuse ids from its bound on, which is Ahead from when it was added.
//
// Services claim with [DefaultPostgreSQLSchema] until it has returned, and also after that: then let them follow
// with [PartitionedPostgreSQLSchema], which refuses other ids.
func (p *Partitions) Convert(ctx context.Context) error {
	for done := false; !done; {
		var err error
		if done, err = p.convertStep(ctx); err != nil {
			return fmt.Errorf("inboxsql: cannot convert table %s: %w", p.table().Quoted(), errors.Join(err, p.abandon(ctx)))
		}
	}
	return p.create(ctx, &PartitionsPass{})
}

// conversion is how far a table has come.
type conversion struct {
	relkind   string // r: plain, p: partitioned; empty: no table
	bound     string // of the CHECK; empty: there is none yet
	validated bool
}

// checkPrefix and the bound are the name of the CHECK.
const checkPrefix = "watermill_inbox_below_"

func (c conversion) check() string { return quoteIdentifier(checkPrefix + c.bound) }

// convertStep looks how far the table has come and takes one step on.
func (p *Partitions) convertStep(ctx context.Context) (done bool, err error) {
	if err := p.repository.find(ctx); err != nil {
		return false, err
	}
	c, err := p.conversion(ctx, p.db)
	if err != nil {
		return false, err
	}
	now, err := p.now(ctx, p.db)
	if err != nil {
		return false, err
	}
	switch at, _ := p.options.IDs.Time(c.bound); {
	case c.relkind == "":
		return false, errors.New("there is no such table")
	case c.relkind == "p":
		return true, p.prepare(ctx)
	case c.bound == "":
		return false, p.addCheck(ctx, now)
	case at.Before(now.Add(p.options.Ahead / 8)):
		return false, p.dropCheck(ctx, c) // left by somebody long ago
	case !c.validated:
		return false, p.validateCheck(ctx, c)
	}
	return false, p.exchange(ctx, c)
}

func (p *Partitions) conversion(ctx context.Context, on querier) (c conversion, err error) {
	var check string
	err = readRows(ctx, on, `SELECT c.relkind, coalesce(k.conname, ''), coalesce(k.convalidated, false) FROM pg_catalog.pg_class c `+
		`LEFT JOIN pg_catalog.pg_constraint k ON k.conrelid = c.oid AND k.contype = 'c' AND starts_with(k.conname, `+pq.QuoteLiteral(checkPrefix)+`) `+
		`WHERE c.oid = `+regclass(p.table()),
		[]any{&c.relkind, &check, &c.validated}, func() error { return nil })
	c.bound = strings.TrimPrefix(check, checkPrefix)
	return c, err
}

// addCheck adds the CHECK, for new records only.
func (p *Partitions) addCheck(ctx context.Context, now time.Time) error {
	c := conversion{bound: p.options.IDs.Bound(now.Add(p.options.Ahead + p.options.Width).Truncate(p.options.Width))}
	if err := p.convertible(ctx, c); err != nil {
		return err
	}
	p.options.Logger.Info("Converting the inbox table", watermill.LogFields{"table": p.table().Quoted(), "bound": c.bound})
	return p.exclusively(ctx, func(tx *sql.Tx) error {
		if now, err := p.conversion(ctx, tx); err != nil || now.relkind != "r" || now.bound != "" {
			return err // another instance was here
		}
		return execAll(ctx, tx, `ALTER TABLE `+p.table().Quoted()+` ADD CONSTRAINT `+c.check()+` CHECK (`+p.condition(c)+`) NOT VALID`)
	})
}

// condition is what ATTACH wants to know of the old table, and that the ids are of the kind.
func (p *Partitions) condition(c conversion) string {
	return `"message_id" ~ ` + pq.QuoteLiteral(p.options.IDs.pattern()) + ` AND "message_id" < ` + pq.QuoteLiteral(c.bound)
}

// convertible returns an error when the table cannot be converted.
func (p *Partitions) convertible(ctx context.Context, c conversion) error {
	query := p.schema.DefaultPostgreSQLSchema.CheckQuery(CheckParams{Table: p.table()})
	query.Query += collationCheck + convertCheck
	problems, err := p.repository.texts(ctx, query)
	if err != nil {
		return err
	}
	if len(problems) > 0 {
		return &CheckError{Table: p.table().Quoted(), Problems: problems}
	}
	var count int
	err = readRows(ctx, p.db, `SELECT count(*) FROM `+p.table().Quoted()+` WHERE NOT (`+p.condition(c)+`)`, []any{&count}, func() error { return nil })
	if err == nil && count > 0 {
		at, _ := p.options.IDs.Time(c.bound)
		err = fmt.Errorf("%d records have ids that are not %ss in their canonical spelling, or are later than %s: delete them or wait until a Cleaner has",
			count, p.options.IDs, utc(at))
	}
	return err
}

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

// validateCheck reads the table, beside claims.
func (p *Partitions) validateCheck(ctx context.Context, c conversion) error {
	_, err := p.db.ExecContext(ctx, `ALTER TABLE `+p.table().Quoted()+` VALIDATE CONSTRAINT `+c.check())
	switch sqlState(err) {
	case stateCheckViolation:
		return errors.Join(p.convertible(ctx, c), err)
	case "42704", "42809": // no such constraint, not a table: another instance was faster
		return nil
	}
	return err
}

// exchange puts the partitioned table in the plain one's place. The CHECK spares ATTACH the reading, and is not
// needed any more then: the partition's bound says the same.
func (p *Partitions) exchange(ctx context.Context, c conversion) error {
	table, old := p.table().Quoted(), Table{schema: p.table().schema, name: p.table().name + "_old"}
	return p.exclusively(ctx, func(tx *sql.Tx) error {
		if now, err := p.conversion(ctx, tx); err != nil || now != c {
			return err // another instance was here
		}
		// The partitioned table's indexes get the names of the plain one's.
		if err := execTexts(ctx, tx, `SELECT format('ALTER INDEX %s RENAME TO %I', i.indexrelid::regclass, left(c.relname, 59) || '_old') `+
			`FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid WHERE i.indrelid = `+regclass(p.table())); err != nil {
			return err
		}
		if err := execAll(ctx, tx,
			`ALTER TABLE `+table+` RENAME TO `+quoteIdentifier(old.name),
			`CREATE TABLE `+table+` (LIKE `+old.Quoted()+` INCLUDING ALL) PARTITION BY RANGE ("message_id")`,
			`ALTER TABLE `+table+` DROP CONSTRAINT `+c.check()); err != nil {
			return err
		}
		if err := execTexts(ctx, tx, grantsQuery(old, p.table())); err != nil {
			return err
		}
		if err := execTexts(ctx, tx, ownerQuery(old, p.table())); err != nil {
			return err
		}
		return execAll(ctx, tx,
			p.attach(partition{name: old, idRange: idRange{high: c.bound}}),
			`ALTER TABLE `+old.Quoted()+` DROP CONSTRAINT `+c.check())
	})
}

// grantsQuery selects the statements that grant on a table what is granted on another.
func grantsQuery(from, to Table) string {
	grantee := `CASE acl.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END || CASE WHEN acl.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END`
	on := ` ON TABLE ` + to.Quoted() + ` TO %s`
	return `SELECT format(` + pq.QuoteLiteral(`GRANT %s`+on) + `, acl.privilege_type, ` + grantee + `) ` +
		`FROM pg_catalog.pg_class c, aclexplode(c.relacl) AS acl WHERE c.oid = ` + regclass(from) + ` UNION ALL ` +
		`SELECT format(` + pq.QuoteLiteral(`GRANT %s (%I)`+on) + `, acl.privilege_type, a.attname, ` + grantee + `) ` +
		`FROM pg_catalog.pg_attribute a, aclexplode(a.attacl) AS acl WHERE a.attrelid = ` + regclass(from) + ` AND NOT a.attisdropped`
}

// abandon leaves the plain table as it was, after an error. When the context has ended there is no time for it.
func (p *Partitions) abandon(ctx context.Context) error {
	if ctx.Err() != nil {
		return nil
	}
	c, err := p.conversion(ctx, p.db)
	if err != nil || c.relkind != "r" || c.bound == "" {
		return err
	}
	return p.dropCheck(ctx, c)
}

func (p *Partitions) dropCheck(ctx context.Context, c conversion) error {
	return p.exclusively(ctx, func(tx *sql.Tx) error {
		if now, err := p.conversion(ctx, tx); err != nil || now.relkind != "r" || now.bound != c.bound {
			return err // another instance was here
		}
		return execAll(ctx, tx, `ALTER TABLE `+p.table().Quoted()+` DROP CONSTRAINT `+c.check())
	})
}

// The wait of a try to get the table for itself.
const (
	firstExclusivePatience = 100 * time.Millisecond
	lastExclusivePatience  = 5 * time.Second
)

// exclusively runs a short transaction that has the table for itself. Claims wait while it waits for open
// handlers, so it tries for a short time, leaves them a multiple of that, and tries again for longer.
func (p *Partitions) exclusively(ctx context.Context, do func(*sql.Tx) error) error {
	for patience := firstExclusivePatience; ; patience = min(2*patience, lastExclusivePatience) {
		err := p.locked(ctx, "ACCESS EXCLUSIVE", patience, do)
		if !hasAnyPrefix(sqlState(err), "55P03", "40P01") {
			return err
		}
		p.options.Logger.Debug("The inbox table is in use, trying again", watermill.LogFields{"table": p.table().Quoted(), "waited": patience})
		if err := pause(ctx, 5*patience); err != nil {
			return err
		}
	}
}
